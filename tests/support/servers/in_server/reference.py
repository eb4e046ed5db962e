"""The same tokens by transformers' own model on one device: ``reference.py MODEL ROWS RESULT``.

Every row's tokens are given, and the model says after each prefix which token is next.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        sys.argv[1], dtype=torch.bfloat16, attn_implementation="eager"
    )
    model = model.to(device).eval()
    rows = []
    for row in json.loads(Path(sys.argv[2]).read_text()):
        given = torch.tensor([row["ids"] + row["tokens"][:-1]], device=device)
        with torch.no_grad():
            logits = model(given).logits[0, len(row["ids"]) - 1 :].float().log_softmax(-1)
        best = logits.topk(2)
        rows.append(
            dict(
                prompt=row["prompt"], ids=row["ids"], tokens=best.indices[:, 0].tolist(),
                logprobs=[float(logits[i, t]) for i, t in enumerate(row["tokens"])],
                margins=(best.values[:, 0] - best.values[:, 1]).tolist(),
            )
        )  # fmt: skip
    Path(sys.argv[3]).write_text(json.dumps(rows))

"""The same tokens by transformers' own model on one device: ``reference.py MODEL ROWS RESULT``.

Every row's tokens are given, and the model says after each prefix which token is next. Rows go
together, the shorter ones with tokens behind their end, which no earlier token sees.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

AT_ONCE = 32

if __name__ == "__main__":
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        sys.argv[1], dtype=torch.bfloat16, attn_implementation="eager"
    )
    model = model.to(device).eval()
    given, rows = json.loads(Path(sys.argv[2]).read_text()), []
    for start in range(0, len(given), AT_ONCE):
        some = given[start : start + AT_ONCE]
        texts = [torch.tensor(row["ids"] + row["tokens"][:-1]) for row in some]
        padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(device)
        with torch.no_grad():
            said = model(padded, use_cache=False).logits
        for row, text, every in zip(some, texts, said, strict=True):
            logits = every[len(row["ids"]) - 1 : len(text)].float().log_softmax(-1)
            best, taken = logits.topk(2), torch.tensor(row["tokens"], device=device)
            rows.append(
                dict(
                    prompt=row["prompt"], ids=row["ids"], tokens=best.indices[:, 0].tolist(),
                    logprobs=logits.gather(1, taken[:, None])[:, 0].tolist(),
                    margins=(best.values[:, 0] - best.values[:, 1]).tolist(),
                )
            )  # fmt: skip
    Path(sys.argv[3]).write_text(json.dumps(rows))

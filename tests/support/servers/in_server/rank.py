"""One rank of vLLM's engine without a server: ``rank.py JOB``, JSON that offline.py wrote.

Every rank is a process of its own in which the whole engine runs (vLLM's external launcher).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    began = time.monotonic()
    import sitecustomize  # that of this folder
    import torch
    import vllm

    imported = time.monotonic()
    engine = vllm.LLM(
        model=job["model"], skip_tokenizer_init=True, disable_log_stats=True,
        async_scheduling=False, distributed_executor_backend="external_launcher", **job["options"],
    )  # fmt: skip
    started = time.monotonic()
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False, logprobs=2
    )
    rows, cached = [], 0
    sitecustomize.steps.clear()
    for _ in range(job["rounds"]):
        ids = [prompt["ids"] for prompt in job["prompts"]]
        outputs = engine.generate([{"prompt_token_ids": one} for one in ids], sampling)
        rows = []
        cached += sum(output.num_cached_tokens or 0 for output in outputs)
        for prompt, output in zip(job["prompts"], outputs, strict=True):
            (made,) = output.outputs
            best = [
                sorted((one.logprob for one in said.values()), reverse=True)
                for said in made.logprobs
            ]
            rows.append(
                dict(
                    prompt=prompt["prompt"], ids=prompt["ids"], tokens=list(made.token_ids),
                    logprobs=[
                        said[token].logprob
                        for token, said in zip(made.token_ids, made.logprobs, strict=True)
                    ],
                    margins=[pair[0] - pair[1] for pair in best],
                )
            )  # fmt: skip
    facts = dict(
        server=f"vllm {vllm.__version__}", torch=torch.__version__,
        device=torch.cuda.get_device_name(), import_s=imported - began,
        start_s=started - imported, generate_s=time.monotonic() - started,
    )  # fmt: skip
    made = dict(facts=facts, rows=rows, cached=cached, steps=sitecustomize.steps)
    Path(job["result"]).write_text(json.dumps(made))
    time.sleep(3)  # a rank that ends first must not take memory away that the other still reads
    os._exit(0)

import os


class _Variable:
    def __init__(self, name: str, default: int) -> None:
        self.name, self.default = name, default

    def get(self) -> int:
        return int(os.environ.get(self.name, self.default))


class envs:
    SGLANG_DEEPEP_BF16_DISPATCH = _Variable("SGLANG_DEEPEP_BF16_DISPATCH", 0)
    SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK = _Variable(
        "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", 128
    )

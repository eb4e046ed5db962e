"""vllm.config.compilation: the rule that takes CUDA graphs away from a backend."""


class CompilationConfig:
    def __init__(self):
        self.cudagraph_mode = "FULL"

    def set_splitting_ops_for_v1(self, all2all_backend: str, data_parallel_size: int = 1):
        if all2all_backend == "deepep_high_throughput" and data_parallel_size > 1:
            self.cudagraph_mode = "NONE"

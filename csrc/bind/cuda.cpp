// deep_comm._cuda: the GPU target. Its Python face is described in deep_comm/_cuda.pyi.
#include "bind/bindings.hpp"

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "The GPU target: the protocol kernels on CUDA, and the memory they work in.";
  m.attr("architectures") = DEEP_COMM_CUDA_ARCHITECTURES;
  deep_comm::bind_memory_cuda(m);
  deep_comm::bind_stream_cuda(m);
  deep_comm::bind_engine_cuda(m);
  deep_comm::bind_bench_cuda(m);
}

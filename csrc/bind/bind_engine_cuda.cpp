#include "bind/bind_engine.hpp"
#include "host/target_cuda.hpp"

namespace deep_comm {

void bind_engine_cuda(pybind11::module_& m) { bind_engine<CudaTarget>(m); }

}  // namespace deep_comm

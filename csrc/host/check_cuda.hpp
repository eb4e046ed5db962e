// What calls of CUDA's runtime return, as exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace deep_comm {

inline void check(cudaError_t status, const char* tried) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // or the next launch check would report this failure a second time
  throw std::runtime_error(std::string(tried) + ": " + cudaGetErrorName(status) + " (" +
                           cudaGetErrorString(status) + ")");
}
inline void check(cudaError_t status, const std::string& tried) { check(status, tried.c_str()); }

}  // namespace deep_comm

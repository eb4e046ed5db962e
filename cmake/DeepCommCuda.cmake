# Finds nvcc if DEEP_COMM_CUDA allows it; sets DEEP_COMM_CUDA_FOUND and deep_comm_cuda_options.

set(DEEP_COMM_CUDA_FOUND OFF)
if(NOT DEEP_COMM_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "DEEP_COMM_CUDA is '${DEEP_COMM_CUDA}'; it must be AUTO, ON or OFF")
endif()
if(NOT DEEP_COMM_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)  # an earlier "not found" would be believed for ever
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(DEEP_COMM_CUDA_FOUND ON)
  elseif(DEEP_COMM_CUDA STREQUAL "ON")
    message(FATAL_ERROR "DEEP_COMM_CUDA=ON but no nvcc was found: put it on PATH or set CUDACXX")
  else()
    message(STATUS "deep_comm: no nvcc, so the CUDA module is not built")
  endif()
endif()

if(DEEP_COMM_CUDA_FOUND)
  include(DeepCommArchitectures)
  deep_comm_architectures("${DEEP_COMM_CUDA_ARCHS}" architecture_flags architectures)
  set(CMAKE_CUDA_ARCHITECTURES OFF)  # CMake cannot make code of sm_90a from PTX of sm_90
  # The static runtime finds the driver when it is first called, so the module imports without one.
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  enable_language(CUDA)
  string(APPEND CMAKE_CUDA_FLAGS "${architecture_flags}")  # also of device links

  add_library(deep_comm_cuda_options INTERFACE)
  target_include_directories(deep_comm_cuda_options SYSTEM INTERFACE
    ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})  # for the .cpp files
  # -no-compress: a module whose cubins can be read by the test that asks for sm_90a in it.
  target_compile_options(deep_comm_cuda_options INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:-lineinfo;--expt-relaxed-constexpr;-no-compress>"
    "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${DEEP_COMM_PTXAS_REPORT}>>:-Xptxas=-v>")
  target_compile_definitions(deep_comm_cuda_options INTERFACE
    DEEP_COMM_TRACE_LOW_LATENCY=$<BOOL:${DEEP_COMM_TRACE_LOW_LATENCY}>)
  target_compile_definitions(deep_comm_cuda_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:DEEP_COMM_CUDA_ARCHITECTURES="${architectures}">)
endif()

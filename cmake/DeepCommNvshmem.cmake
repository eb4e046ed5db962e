# Finds NVSHMEM's headers and libraries, in NVSHMEM_HOME or among the Python packages of the interpreter that the
# module is built for; sets DEEP_COMM_NVSHMEM_FOUND and deep_comm_nvshmem.

set(DEEP_COMM_NVSHMEM_FOUND OFF)
if(NOT DEEP_COMM_NVSHMEM MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "DEEP_COMM_NVSHMEM is '${DEEP_COMM_NVSHMEM}'; it must be AUTO, ON or OFF")
endif()
if(NOT DEEP_COMM_NVSHMEM STREQUAL "OFF" AND DEEP_COMM_CUDA_FOUND)
  if(DEFINED ENV{NVSHMEM_HOME})
    set(nvshmem_home "$ENV{NVSHMEM_HOME}")
  else()
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c "if True:
        import os, site, sys, sysconfig
        places = [*sys.path, sysconfig.get_path('purelib'), *site.getsitepackages(), site.getusersitepackages()]
        homes = [os.path.join(place, 'nvidia', 'nvshmem') for place in places if place]
        print(next((home for home in homes if os.path.isdir(os.path.join(home, 'include'))), ''))"
      OUTPUT_VARIABLE nvshmem_home OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
  if(nvshmem_home)
    find_path(nvshmem_include nvshmem.h HINTS "${nvshmem_home}/include" NO_DEFAULT_PATH NO_CACHE)
    find_file(nvshmem_host NAMES libnvshmem_host.so.3 libnvshmem_host.so
              HINTS "${nvshmem_home}/lib" NO_DEFAULT_PATH NO_CACHE)
    find_file(nvshmem_device libnvshmem_device.a HINTS "${nvshmem_home}/lib" NO_DEFAULT_PATH NO_CACHE)
  endif()
  if(nvshmem_include AND nvshmem_host AND nvshmem_device)
    set(DEEP_COMM_NVSHMEM_FOUND ON)
    message(STATUS "deep_comm: NVSHMEM in ${nvshmem_home}")
  elseif(DEEP_COMM_NVSHMEM STREQUAL "ON")
    message(FATAL_ERROR "DEEP_COMM_NVSHMEM=ON but NVSHMEM was not found: pip install nvidia-nvshmem-cu13, or set NVSHMEM_HOME")
  else()
    message(STATUS "deep_comm: no NVSHMEM, so the module for groups of several hosts is not built")
  endif()
endif()

if(DEEP_COMM_NVSHMEM_FOUND)
  # The wheel has no CMake config and no unversioned library.
  add_library(deep_comm_nvshmem_host SHARED IMPORTED)
  set_target_properties(deep_comm_nvshmem_host PROPERTIES IMPORTED_LOCATION "${nvshmem_host}")
  add_library(deep_comm_nvshmem_device STATIC IMPORTED)
  set_target_properties(deep_comm_nvshmem_device PROPERTIES IMPORTED_LOCATION "${nvshmem_device}")
  add_library(deep_comm_nvshmem INTERFACE)
  target_include_directories(deep_comm_nvshmem SYSTEM INTERFACE "${nvshmem_include}")
  target_link_libraries(deep_comm_nvshmem INTERFACE deep_comm_nvshmem_host deep_comm_nvshmem_device)
endif()

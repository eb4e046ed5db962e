# What every target of the project is compiled with, and how a module is installed.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release)
endif()
# -O2: the host target's time goes into fiber switches and memcpy, which -O3 does not make faster, and
# the build is shorter. Asserts stay out of Release; what must be checked is checked by an exception.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g0 -DNDEBUG")
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")  # -O3 is nvcc's own default for device code

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

# A second build then takes seconds, even of another clone or in another folder of build/.
find_program(DEEP_COMM_CCACHE ccache)
if(DEEP_COMM_CCACHE)
  set(ccache "${DEEP_COMM_CCACHE}")
  if(NOT DEFINED ENV{CCACHE_BASEDIR})
    set(ccache "${CMAKE_COMMAND}" -E env "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" "${DEEP_COMM_CCACHE}")
  endif()
  foreach(language CXX CUDA)
    if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
      set(CMAKE_${language}_COMPILER_LAUNCHER ${ccache})
    endif()
  endforeach()
endif()

# Includes are written from csrc/: "device/arch/arch.cuh".
add_library(deep_comm_options INTERFACE)
target_include_directories(deep_comm_options INTERFACE "${PROJECT_SOURCE_DIR}/csrc")
target_compile_options(deep_comm_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>)

# finds_races: the module calls csrc/simt/plain_accesses.cpp at every plain load and store, and keeps the
# line tables that reports of races point into.
function(deep_comm_install_module target finds_races)
  # What comes from a static library stays inside the module: torch may carry another CUDA runtime.
  target_link_options(${target} PRIVATE "LINKER:--exclude-libs,ALL")
  if(finds_races)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=thread -g1>
      $<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=tsan-instrument-func-entry-exit=0 -Wno-tsan>)
  else()
    target_link_options(${target} PRIVATE "$<$<CONFIG:Release>:LINKER:-s>")
  endif()
  install(TARGETS ${target} LIBRARY DESTINATION deep_comm COMPONENT python)
endfunction()

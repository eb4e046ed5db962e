# What nvcc is asked for: deep_comm_architectures(LIST FLAGS NAMES) makes of "80;90a-real" the flags
# and what the module answers when asked for its architectures: "80 ptx80 90a".

function(deep_comm_architectures list flags names)
  set(found_flags "")
  set(found_names "")
  if("${list}" STREQUAL "")
    set(list "none")  # which is refused
  endif()
  foreach(entry IN LISTS list)
    if(NOT entry MATCHES "^(80|90a|100f|120f)(-real|-virtual)?$")
      message(FATAL_ERROR "DEEP_COMM_CUDA_ARCHS names '${entry}'; it is a list with semicolons of 80, 90a, "
              "100f and 120f, each followed by nothing (machine code and PTX), -real (machine code) or -virtual (PTX)")
    endif()
    set(name "${CMAKE_MATCH_1}")
    set(kind "${CMAKE_MATCH_2}")
    # The kernels use nothing that sm_90a has and sm_90 lacks. PTX of sm_90 runs on later GPUs, PTX of sm_90a does not.
    string(REGEX REPLACE "a$" "" virtual "${name}")
    set(codes "")
    if(NOT kind STREQUAL "-virtual")
      list(APPEND codes "sm_${name}")
      list(APPEND found_names "${name}")
    endif()
    if(NOT kind STREQUAL "-real")
      list(APPEND codes "compute_${virtual}")
      list(APPEND found_names "ptx${virtual}")
    endif()
    list(JOIN codes "," codes)
    string(APPEND found_flags " \"-gencode=arch=compute_${virtual},code=[${codes}]\"")
  endforeach()
  list(JOIN found_names " " found_names)
  set(${flags} "${found_flags}" PARENT_SCOPE)
  set(${names} "${found_names}" PARENT_SCOPE)
endfunction()

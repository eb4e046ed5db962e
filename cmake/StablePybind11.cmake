# pip builds in a new temporary environment each time, and so pybind11's headers have another path in
# each build: everything would be compiled again and no compiler cache would help. One path inside the
# build folder, that leads to wherever the headers are today, keeps the command lines equal.

get_target_property(real_includes pybind11::pybind11_headers INTERFACE_INCLUDE_DIRECTORIES)
list(LENGTH real_includes num_includes)
if(num_includes EQUAL 1)
  set(stable_include "${CMAKE_BINARY_DIR}/pybind11-include")
  file(CREATE_LINK "${real_includes}" "${stable_include}" SYMBOLIC)
  set_target_properties(pybind11::pybind11_headers PROPERTIES
                        INTERFACE_INCLUDE_DIRECTORIES "${stable_include}")
endif()

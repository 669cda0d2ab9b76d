# Options, warnings, and the functions that make a layer of src/ and a test into targets.

option(DEEPINFER_TESTS "build the tests" ON)
option(DEEPINFER_WERROR "warnings are errors (CI)" OFF)
option(DEEPINFER_FUZZ "build libFuzzer targets (clang)" OFF)
option(DEEPINFER_FRONT "put links to the program and the library into build/" OFF)
set(DEEPINFER_SANITIZE "" CACHE STRING "sanitizers, as for -fsanitize=")
set(DEEPINFER_ACCELERATOR auto CACHE STRING "backend modules to build: auto, cpu, nvidia, ascend")
set_property(CACHE DEEPINFER_ACCELERATOR PROPERTY STRINGS auto cpu nvidia ascend)
if(NOT DEEPINFER_ACCELERATOR MATCHES "^(auto|cpu|nvidia|ascend)$")
    message(FATAL_ERROR "DEEPINFER_ACCELERATOR: found '${DEEPINFER_ACCELERATOR}', expected auto, cpu, nvidia or ascend")
endif()

# CUDA as a language of the whole tree: where it is asked for, and by itself where nvcc and a GPU's driver are (on Linux,
# or below Windows), so that nobody waits minutes for a module that their machine can't load. The targets are named by
# flags (src/backend/cuda).
set(DEEPINFER_CUDA OFF)
set(DEEPINFER_HAS_GPU FALSE)
foreach(path /dev/nvidiactl /proc/driver/nvidia/version /dev/dxg)
    if(EXISTS ${path})
        set(DEEPINFER_HAS_GPU TRUE)
    endif()
endforeach()
if(DEEPINFER_ACCELERATOR STREQUAL nvidia OR (DEEPINFER_ACCELERATOR STREQUAL auto AND DEEPINFER_HAS_GPU))
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
        set(CMAKE_CUDA_ARCHITECTURES OFF)
        set(CMAKE_CUDA_STANDARD 17)
        enable_language(CUDA)
        set(DEEPINFER_CUDA ON)
    elseif(DEEPINFER_ACCELERATOR STREQUAL nvidia)
        message(FATAL_ERROR "DEEPINFER_ACCELERATOR=nvidia: nvcc is not found; set CUDACXX or put it on the path")
    endif()
endif()

if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS ON) # POSIX and GNU declarations of the C library
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# No -DNDEBUG: assertions on our own bugs stay on in release builds.
set(CMAKE_C_FLAGS_RELEASE "-O3 -g1")
set(CMAKE_C_FLAGS_DEBUG "-O1 -g3")
set(CMAKE_C_FLAGS_RELWITHDEBINFO "-O2 -g1") # the sanitizers

# -ffp-contract=off: fused multiply-add only where it is written.
add_compile_options("$<$<COMPILE_LANGUAGE:C>:-Wall;-Wextra;-Wshadow;-Wstrict-prototypes;-Wmissing-prototypes;-Wvla>"
                    "$<$<COMPILE_LANGUAGE:C>:-ffp-contract=off;-fno-math-errno>"
                    "$<$<COMPILE_LANGUAGE:C>:SHELL:-include ${CMAKE_SOURCE_DIR}/src/base/banned.h>")
add_compile_definitions(_GNU_SOURCE)
# The engine checks its invariants after every step where speed doesn't matter.
if(CMAKE_BUILD_TYPE STREQUAL Debug OR DEEPINFER_SANITIZE)
    add_compile_definitions(DEEPINFER_DEBUG)
endif()
if(DEEPINFER_WERROR)
    add_compile_options($<$<COMPILE_LANGUAGE:C>:-Werror>)
endif()
if(DEEPINFER_SANITIZE)
    add_compile_options(
        "$<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${DEEPINFER_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all>")
    add_link_options(-fsanitize=${DEEPINFER_SANITIZE})
endif()
if(DEEPINFER_FUZZ)
    if(NOT CMAKE_C_COMPILER_ID STREQUAL Clang)
        message(FATAL_ERROR "DEEPINFER_FUZZ needs clang: configure with -DCMAKE_C_COMPILER=clang")
    endif()
    add_compile_options(-fsanitize=fuzzer-no-link)
endif()

# di_layer(NAME [STRICT] [WITHOUT REGEX] LINKS ...): every .c of the folder, less those whose path matches, as a static
# library di_NAME whose links are the layers that it may use. STRICT adds the warnings on implicit conversions. A folder
# without a .c yet is its headers and links alone.
function(di_layer name)
    cmake_parse_arguments(ARG "STRICT" "WITHOUT" "LINKS" ${ARGN})
    file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.c)
    if(ARG_WITHOUT)
        list(FILTER sources EXCLUDE REGEX "${ARG_WITHOUT}")
    endif()
    if(sources)
        add_library(di_${name} STATIC ${sources})
        set(scope PUBLIC)
        set_property(GLOBAL APPEND PROPERTY DEEPINFER_LAYERS di_${name})
        if(ARG_STRICT)
            target_compile_options(di_${name} PRIVATE -Wconversion -Wno-sign-conversion)
        endif()
    else()
        add_library(di_${name} INTERFACE)
        set(scope INTERFACE)
    endif()
    target_include_directories(di_${name} ${scope} ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/include)
    target_link_libraries(di_${name} ${scope} ${ARG_LINKS})
endfunction()

# di_test(NAME LABEL LABEL [SPLIT] SOURCES ... LINKS ...): a cmocka program on the harness, registered with ctest as NAME
# (unit_x as unit.x). With SPLIT every group is an entry of its own, NAME.GROUP, so that slow ones run side by side. Groups
# named long_* are left to another entry, NAME.long with the label `long`.
function(di_test name)
    cmake_parse_arguments(ARG "SPLIT" "LABEL" "SOURCES;LINKS" ${ARGN})
    add_executable(test_${name} ${ARG_SOURCES})
    target_link_libraries(test_${name} PRIVATE di_harness ${ARG_LINKS})
    string(REPLACE "unit_" "unit." test ${name})
    # The groups are read from the sources, so that a change of these configures again.
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${ARG_SOURCES})
    set(has_long FALSE)
    foreach(source ${ARG_SOURCES})
        file(STRINGS ${source} lines REGEX "^DI_TEST_GROUP\\([a-z0-9_]+")
        foreach(line ${lines})
            string(REGEX REPLACE "^DI_TEST_GROUP\\(([a-z0-9_]+).*" "\\1" group "${line}")
            if(group MATCHES "^long_")
                set(has_long TRUE)
            elseif(ARG_SPLIT)
                add_test(NAME ${test}.${group} COMMAND test_${name} ${group})
                set_tests_properties(${test}.${group} PROPERTIES LABELS ${ARG_LABEL} TIMEOUT 1200)
            endif()
        endforeach()
    endforeach()
    if(NOT ARG_SPLIT)
        add_test(NAME ${test} COMMAND test_${name})
        set_tests_properties(${test} PROPERTIES LABELS ${ARG_LABEL} TIMEOUT 1200)
    endif()
    if(has_long)
        add_test(NAME ${test}.long COMMAND test_${name} --long)
        set_tests_properties(${test}.long PROPERTIES LABELS long TIMEOUT 7200)
    endif()
endfunction()

# di_front_link(TARGET NAME): build/NAME leads to the target's file, whatever the preset's folder is called.
function(di_front_link target name)
    file(RELATIVE_PATH folder ${CMAKE_SOURCE_DIR}/build ${CMAKE_BINARY_DIR})
    add_custom_command(TARGET ${target} POST_BUILD
                       COMMAND ${CMAKE_COMMAND} -E create_symlink ${folder}/$<TARGET_FILE_NAME:${target}>
                               ${CMAKE_SOURCE_DIR}/build/${name})
endfunction()

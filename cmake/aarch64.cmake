# Toolchain: programs for AArch64 Linux by Debian's cross compiler, run by qemu-user. DEEPINFER_ROOT is a folder with the
# libraries' packages for arm64 unpacked (.ci/run makes it); the C library comes with the compiler.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)

set(DEEPINFER_ROOT ${CMAKE_CURRENT_LIST_DIR}/../build/arm64-root CACHE PATH "arm64 packages, unpacked")
set(libraries ${DEEPINFER_ROOT}/usr/lib/aarch64-linux-gnu)
set(libraries_base ${DEEPINFER_ROOT}/lib/aarch64-linux-gnu)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH=${libraries}:${libraries_base})
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES DEEPINFER_ROOT)
set(CMAKE_EXE_LINKER_FLAGS_INIT -Wl,-rpath-link,${libraries}:${libraries_base})

set(CMAKE_FIND_ROOT_PATH ${DEEPINFER_ROOT})
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(ENV{PKG_CONFIG_LIBDIR} ${libraries}/pkgconfig)
set(ENV{PKG_CONFIG_SYSROOT_DIR} ${DEEPINFER_ROOT})

// launch.h: how this project starts kernels and declares shared memory, in a form that nvcc and the emulator (dev/emu) both compile as it stands.
//
//   LAUNCH(kernel, grid, block, dynamic_shared_bytes, stream, arguments...)     the kernel may be a template: LAUNCH(copy_kernel<float, 4>, ...)
//   SHARED(type, name, count);        static shared array of the block, at the top of a kernel or device function; an array, so sizeof(name) is its size
//   SHARED_DYNAMIC(type, name);       pointer to the dynamic_shared_bytes of the launch
//
// Arguments are converted to the kernel's parameter types as in any call; an empty pointer is nullptr (0 and NULL are integers here). Both kinds of arrays
// are 16-byte aligned. A launch that cannot run ends the program here, with its text, file and line.
#pragma once
#include <cuda_runtime.h>
#include "../../llmc/check.h"

#define LAUNCH(...) launch_kernel(__FILE__, __LINE__, #__VA_ARGS__, __VA_ARGS__)

#if defined(__CUDACC__)
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define SHARED_DYNAMIC(type, name) extern __shared__ __align__(16) unsigned char shared_dynamic[]; type *name = reinterpret_cast<type *>(shared_dynamic)
#else
#include <functional>
void emu_launch(const char *file, int line, const char *text, dim3 grid, dim3 block, size_t dynamic, cudaStream_t stream, std::function<void()> body);
void *emu_shared(const void *key, size_t bytes);
void *emu_shared_dynamic(void);
#define SHARED(type, name, count) static char name##_key; type (&name)[count] = *static_cast<type (*)[count]>(emu_shared(&name##_key, sizeof(type) * (count)))
#define SHARED_DYNAMIC(type, name) type *name = static_cast<type *>(emu_shared_dynamic())
#endif

template <typename... P, typename... A>
static void launch_kernel(const char *file, int line, const char *text, void (*kernel)(P...), dim3 grid, dim3 block, size_t dynamic, cudaStream_t stream, A... arguments) {
    static_assert(sizeof...(P) == sizeof...(A), "LAUNCH: the kernel takes another number of arguments");
#if defined(__CUDACC__)
    if (dynamic > 48 << 10) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)dynamic);
    kernel<<<grid, block, dynamic, stream>>>(arguments...);
#else
    emu_launch(file, line, text, grid, block, dynamic, stream, [=] { kernel(arguments...); });
#endif
    cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
        check_failed(file, line, "a launch was refused: %s: LAUNCH(%s) with grid (%u, %u, %u), block (%u, %u, %u), %zu bytes of dynamic shared memory\n"
                     "  -> at most 1024 threads a block and 227 KiB of shared memory; no empty grid", cudaGetErrorString(error), text,
                     grid.x, grid.y, grid.z, block.x, block.y, block.z, dynamic);
    }
}

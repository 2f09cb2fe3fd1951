/* The CUDA driver: memory on a GPU. Calls return 0 or a negative CUresult unless
 * stated otherwise. */
#ifndef SLUICE_CUDA_H
#define SLUICE_CUDA_H

#include <stddef.h>
#include <stdint.h>

/* Loads libcuda.so.1 and retains the primary context of the device, which the calls
 * below use. Returns 0, a negative CUresult, or a code of enum sluice_load; why
 * receives the reason. */
int sluice_cuda_open(int device, char *why, size_t why_len);
int sluice_cuda_count(int *devices, char *why, size_t why_len);
/* Makes the device's context current in the calling thread. Returns a CUresult. */
int sluice_cuda_bind(int device);
int sluice_cuda_driver(int *version);
int sluice_cuda_alloc(int device, size_t bytes, uint64_t *address);
int sluice_cuda_free(int device, uint64_t address);
int sluice_cuda_write(int device, uint64_t to, const void *from, size_t bytes);
int sluice_cuda_read(int device, void *to, uint64_t from, size_t bytes);

#endif

/* The CUDA driver, through prototypes declared here: enough to allocate, write and read
 * memory on a GPU. It uses the primary context, as CUDA's runtime and engines do. */
#define _GNU_SOURCE
#include "cuda/cuda.h"
#include "dl/dl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define MAX_DEVICES 64

static struct {
  int (*init)(unsigned);
  int (*driver)(int *);
  int (*count)(int *);
  int (*device)(int *, int);
  int (*retain)(void **, int);
  int (*set_current)(void *);
  int (*alloc)(uint64_t *, size_t);
  int (*release)(uint64_t);
  int (*to_device)(uint64_t, const void *, size_t);
  int (*to_host)(void *, uint64_t, size_t);
  int (*synchronize)(void);
  int (*error_name)(int, const char **);
} cu;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int opened;
static void *contexts[MAX_DEVICES];

static const struct {
  const char *name;
  void *slot;
} symbols[] = {
    {"cuInit", &cu.init},
    {"cuDriverGetVersion", &cu.driver},
    {"cuDeviceGetCount", &cu.count},
    {"cuDeviceGet", &cu.device},
    {"cuDevicePrimaryCtxRetain", &cu.retain},
    {"cuCtxSetCurrent", &cu.set_current},
    {"cuMemAlloc_v2", &cu.alloc},
    {"cuMemFree_v2", &cu.release},
    {"cuMemcpyHtoD_v2", &cu.to_device},
    {"cuMemcpyDtoH_v2", &cu.to_host},
    {"cuCtxSynchronize", &cu.synchronize},
    {"cuGetErrorName", &cu.error_name},
};

static int refused(int result, const char *what, char *why, size_t why_len) {
  const char *name = NULL;
  cu.error_name(result, &name);
  snprintf(why, why_len, "%s: %s (%d)", what, name != NULL ? name : "unknown error", result);
  return -result;
}

static int open_locked(char *why, size_t why_len) {
  if (opened) {
    return 0;
  }
  (void)dlerror();
  void *h = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (h == NULL) {
    const char *e = dlerror();
    snprintf(why, why_len, "%s", e != NULL ? e : "dlopen failed without a reason");
    return SLUICE_LOAD_ABSENT;
  }
  for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
    void *p = dlsym(h, symbols[i].name);
    if (p == NULL) {
      snprintf(why, why_len, "libcuda.so.1 lacks %s", symbols[i].name);
      return SLUICE_LOAD_SYMBOL;
    }
    memcpy(symbols[i].slot, &p, sizeof p);
  }
  int r = cu.init(0);
  if (r != 0) {
    return refused(r, "cuInit", why, why_len);
  }
  opened = 1;
  return 0;
}

int sluice_cuda_count(int *devices, char *why, size_t why_len) {
  pthread_mutex_lock(&lock);
  int r = open_locked(why, why_len);
  if (r == 0) {
    r = cu.count(devices);
    if (r != 0) {
      r = refused(r, "cuDeviceGetCount", why, why_len);
    }
  }
  pthread_mutex_unlock(&lock);
  return r;
}

int sluice_cuda_open(int device, char *why, size_t why_len) {
  if (device < 0 || device >= MAX_DEVICES) {
    snprintf(why, why_len, "device %d: want 0 to %d", device, MAX_DEVICES - 1);
    return SLUICE_LOAD_ABSENT;
  }
  pthread_mutex_lock(&lock);
  int r = open_locked(why, why_len), handle = 0;
  if (r == 0 && contexts[device] == NULL) {
    r = cu.device(&handle, device);
    if (r != 0) {
      r = refused(r, "cuDeviceGet", why, why_len);
    } else if ((r = cu.retain(&contexts[device], handle)) != 0) {
      contexts[device] = NULL;
      r = refused(r, "cuDevicePrimaryCtxRetain", why, why_len);
    }
  }
  pthread_mutex_unlock(&lock);
  return r;
}

/* Every call makes the context current, because goroutines move between threads. */
int sluice_cuda_bind(int device) {
  if (device < 0 || device >= MAX_DEVICES) {
    return 101; /* CUDA_ERROR_INVALID_DEVICE */
  }
  pthread_mutex_lock(&lock);
  void *context = contexts[device];
  pthread_mutex_unlock(&lock);
  return context == NULL ? 3 /* CUDA_ERROR_NOT_INITIALIZED */ : cu.set_current(context);
}

int sluice_cuda_driver(int *version) {
  pthread_mutex_lock(&lock);
  int r = opened ? -cu.driver(version) : -3;
  pthread_mutex_unlock(&lock);
  return r;
}

int sluice_cuda_alloc(int device, size_t bytes, uint64_t *address) {
  int r = sluice_cuda_bind(device);
  return -(r != 0 ? r : cu.alloc(address, bytes));
}

int sluice_cuda_free(int device, uint64_t address) {
  int r = sluice_cuda_bind(device);
  return -(r != 0 ? r : cu.release(address));
}

/* A copy from pageable memory returns when the bytes are in the driver's staging buffer.
 * Without synchronize a network card could still read the previous content. */
int sluice_cuda_write(int device, uint64_t to, const void *from, size_t bytes) {
  int r = sluice_cuda_bind(device);
  if (r == 0) {
    r = cu.to_device(to, from, bytes);
  }
  return -(r != 0 ? r : cu.synchronize());
}

int sluice_cuda_read(int device, void *to, uint64_t from, size_t bytes) {
  int r = sluice_cuda_bind(device);
  return -(r != 0 ? r : cu.to_host(to, from, bytes));
}

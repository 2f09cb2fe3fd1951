#define _GNU_SOURCE
#include "sluice_native.h"

#include <dlfcn.h>
#include <stddef.h>

int sluice_native_abi(void) { return SLUICE_NATIVE_ABI; }

int sluice_native_resident(const char *soname) {
  if (soname == NULL || soname[0] == '\0') {
    return -1;
  }
  void *h = dlopen(soname, RTLD_LAZY | RTLD_NOLOAD | RTLD_LOCAL);
  if (h == NULL) {
    return 0;
  }
  dlclose(h); /* NOLOAD took a reference */
  return 1;
}

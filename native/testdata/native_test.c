#include "sluice_native.h"

#include <stdio.h>

static int failed;

static void check(int ok, const char *what) {
  if (!ok) {
    fprintf(stderr, "FAIL %s\n", what);
    failed++;
  }
}

int main(void) {
  check(sluice_native_abi() == SLUICE_NATIVE_ABI, "abi of header and library agree");
  check(sluice_native_resident("libc.so.6") == 1, "libc is resident");
  check(sluice_native_resident("libsluice-no-such.so.9") == 0, "an unknown library is not resident");
  check(sluice_native_resident("") == -1, "an empty name is refused");
  check(sluice_native_resident(NULL) == -1, "a NULL name is refused");
  printf("%d passed, %d failed\n", 5 - failed, failed);
  return failed != 0;
}

/* Loading of shared libraries at run time, and the protection of Go's signal
 * handlers from them. The folders nixl, ucx and cuda build on it; it knows none of
 * those libraries. Nothing in native/ links against NIXL, UCX or CUDA, and no
 * header of theirs is needed to build. */
#ifndef SLUICE_DL_H
#define SLUICE_DL_H

#include <stddef.h>
#include <stdint.h>

/* Version of the C surface of native/. Every incompatible change of a header that
 * another folder includes increments it; that also makes `go build` recompile the
 * folders that include the header, because Go hashes only a package's own files. */
#define SLUICE_NATIVE_ABI 5

/* The version the library was compiled with. */
int sluice_native_abi(void);

enum sluice_load {
  SLUICE_LOAD_OK = 0,
  SLUICE_LOAD_ABSENT = 1,  /* no such file, at the path or on the loader's search path */
  SLUICE_LOAD_BROKEN = 2,  /* the loader rejects the file, or a library it needs is missing */
  SLUICE_LOAD_SYMBOL = 3,  /* a required symbol is missing: the library is too old, or another one */
  SLUICE_LOAD_TOO_NEW = 4, /* a major version that this code does not know */
  SLUICE_LOAD_STUB = 5,    /* NIXL's stub, which aborts when it is called */
  SLUICE_LOAD_OTHER = 6,   /* another copy of the library is loaded already; a process can use one */
  SLUICE_LOAD_THREAD = 7   /* the loading thread cannot be started */
};

/* Reports whether a shared library is mapped into this process: 1 yes, 0 no,
 * -1 if the name is NULL or empty. It loads nothing, so it runs no foreign
 * constructor and changes no signal handler. */
int sluice_dl_resident(const char *soname);

/* Writes the file that the loader resolved handle to, and its soname. Each is ""
 * if the loader does not know it. */
void sluice_dl_identify(void *handle, char *file, size_t file_len, char *soname, size_t soname_len);

/* Stores the address of a symbol in *slot, which is a function pointer.
 * Returns 0 if the library has no such symbol; *slot is then NULL. */
int sluice_dl_symbol(void *handle, const char *name, void *slot);

/* A loader: fills why with the reason of a failure, or with the resolved file. */
typedef int (*sluice_dl_loader)(const char *path, char *why, size_t why_len);

/* Runs load in a thread of its own and waits for it. All signals are blocked in
 * that thread, because the threads that a library starts inherit the mask. One
 * load runs at a time in the process. A library whose constructors hang makes this
 * call hang, so the caller must be able to abandon its own thread. */
int sluice_dl_load_in_thread(sluice_dl_loader load, const char *path, char *why, size_t why_len);

/* Saves the signal handlers of the process. Loaders call it before dlopen; only
 * the first call has an effect. */
void sluice_signals_remember(void);

/* Compares the signal handlers with the saved ones and restores each handler that
 * a shared library has replaced. Returns the bit set of the restored signals,
 * 1 to 63. */
uint64_t sluice_signals_restore(void);

#endif

/* The flat C surface of Sluice. Own types only, no third-party header. */
#ifndef SLUICE_NATIVE_H
#define SLUICE_NATIVE_H

#ifdef __cplusplus
extern "C" {
#endif

/* ABI of this surface; grows by one at each incompatible change. */
#define SLUICE_NATIVE_ABI 1

/* The ABI the library was compiled with. */
int sluice_native_abi(void);

/* Says whether a shared library is in this process already: 1 yes, 0 no,
 * -1 for a NULL or empty name. It never loads anything, and so runs no foreign
 * constructor and changes no signal handler. */
int sluice_native_resident(const char *soname);

#ifdef __cplusplus
}
#endif
#endif

/* Functions that a static libzmq refers to and Sluice never uses, as stubs that fail: PGM and
 * NORM multicast (endpoints pgm:, epgm: and norm:, which no configuration field accepts) and
 * GSSAPI authentication (ZMQ_GSSAPI_… socket options). See scripts/static-zmq.sh. */
#include <stdint.h>

/* A status of GSSAPI with an error bit set: GSS_S_UNAVAILABLE, RFC 2744, section 3.9.1. */
#define GSSAPI_UNAVAILABLE ((uint32_t)16 << 16)

#define STUB(name, type, value)                                                                \
  type name(void);                                                                             \
  type name(void) { return value; }

#define GSSAPI(name) STUB(name, uint32_t, GSSAPI_UNAVAILABLE)
#define FAILS(name) STUB(name, uintptr_t, 0) /* NULL, false, or an invalid handle */

GSSAPI(gss_accept_sec_context)
GSSAPI(gss_acquire_cred)
GSSAPI(gss_delete_sec_context)
GSSAPI(gss_display_name)
GSSAPI(gss_import_name)
GSSAPI(gss_init_sec_context)
GSSAPI(gss_release_buffer)
GSSAPI(gss_release_cred)
GSSAPI(gss_release_name)
GSSAPI(gss_unwrap)
GSSAPI(gss_wrap)
void *GSS_C_NT_HOSTBASED_SERVICE = 0;
void *GSS_C_NT_USER_NAME = 0;

/* libzmq calls pgm_init when it creates a context and aborts unless it returns true. */
STUB(pgm_init, int, 1)
STUB(pgm_shutdown, int, 1)
FAILS(pgm_bind3)
FAILS(pgm_close)
FAILS(pgm_connect)
FAILS(pgm_error_free)
FAILS(pgm_free)
FAILS(pgm_freeaddrinfo)
FAILS(pgm_getaddrinfo)
FAILS(pgm_getsockopt)
FAILS(pgm_gsi_create_from_data)
FAILS(pgm_recvmsgv)
FAILS(pgm_send)
FAILS(pgm_setsockopt)
FAILS(pgm_socket)

uint32_t const NORM_NODE_ANY = 0xffffffff;
void *const NORM_INSTANCE_INVALID = 0;
void *const NORM_SESSION_INVALID = 0;
void *const NORM_OBJECT_INVALID = 0;
FAILS(NormCreateInstance)
FAILS(NormCreateSession)
FAILS(NormDestroyInstance)
FAILS(NormDestroySession)
FAILS(NormGetDescriptor)
FAILS(NormGetNextEvent)
FAILS(NormGetRandomSessionId)
FAILS(NormIsUnicastAddress)
FAILS(NormNodeDelete)
FAILS(NormObjectGetType)
FAILS(NormObjectGetUserData)
FAILS(NormObjectSetUserData)
FAILS(NormSetCongestionControl)
FAILS(NormSetDefaultSyncPolicy)
FAILS(NormSetDefaultUnicastNack)
FAILS(NormSetLoopback)
FAILS(NormSetMulticastInterface)
FAILS(NormSetRxPortReuse)
FAILS(NormSetTTL)
FAILS(NormStartReceiver)
FAILS(NormStartSender)
FAILS(NormStopInstance)
FAILS(NormStopReceiver)
FAILS(NormStopSender)
FAILS(NormStreamFlush)
FAILS(NormStreamOpen)
FAILS(NormStreamRead)
FAILS(NormStreamSeekMsgStart)
FAILS(NormStreamWrite)

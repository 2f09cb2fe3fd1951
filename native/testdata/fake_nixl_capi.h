/* How a test tells the fake library what to answer; reached by dlsym. */
#ifndef FAKE_NIXL_CAPI_H
#define FAKE_NIXL_CAPI_H

#define FAKE_NORMAL 1000 /* do what NIXL does */
#define FAKE_EMPTY 1001  /* answer success, without the result */
#define FAKE_HANG 1002   /* do not come back before fake_reset */

/* Of "arrivals": what create_backend opens. */
#define FAKE_ARRIVALS 2001
#define FAKE_ALWAYS 2002
#define FAKE_NEVER 2003

void fake_set(const char *name, int status, int times);
void fake_reset(void);
int fake_calls(const char *name);
void fake_pending(int polls);

#endif

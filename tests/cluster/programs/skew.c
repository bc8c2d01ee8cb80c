/* Preloaded into a program: its wall clock is SKEW_S seconds ahead (behind if negative). Every other clock is left alone, so
 * timeouts take as long as ever. For dynamic programs; Python reads the time by clock_gettime. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long skew_s(void)
{
    const char *text = getenv("SKEW_S");
    return text ? strtol(text, NULL, 10) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += skew_s();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    *now = (struct timeval){.tv_sec = precise.tv_sec, .tv_usec = precise.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *to)
{
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (to)
        *to = precise.tv_sec;
    return precise.tv_sec;
}

/* PID 1 of a machine: collects every child, and does nothing else. A machine's PID 1 ends by SIGKILL alone. */
#include <errno.h>
#include <sys/wait.h>
#include <unistd.h>

int main(void)
{
    for (;;)
        if (waitpid(-1, NULL, 0) < 0 && errno == ECHILD)
            pause();
}

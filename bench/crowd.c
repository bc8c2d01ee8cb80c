/* A crowd of ordinary processes: crowd PROCESSES DESCRIPTORS MAPPINGS
 *
 * Each holds so many descriptors (files, pipes, sockets, event counters in turn) and so many mappings of a file.
 * Prints "ready" when all are up, and lives until its standard input ends; the crowd dies with it (PR_SET_PDEATHSIG).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

/* One descriptor, or two for a pipe where there is room; returns how many. */
static int open_one(int turn, int room)
{
	int pair[2];

	switch (turn % 4) {
	case 0:
		return open("/proc/self/exe", O_RDONLY) < 0 ? -1 : 1;
	case 1:
		if (room < 2)
			return eventfd(0, 0) < 0 ? -1 : 1;
		return pipe(pair) < 0 ? -1 : 2;
	case 2:
		return socket(AF_UNIX, SOCK_STREAM, 0) < 0 ? -1 : 1;
	default:
		return eventfd(0, 0) < 0 ? -1 : 1;
	}
}

static void live(int descriptors, int mappings, int ready)
{
	int executable, opened = 0, turn;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	executable = open("/proc/self/exe", O_RDONLY);
	if (executable < 0)
		fail("/proc/self/exe");
	for (turn = 0; turn < mappings; turn++) /* neighbours of unlike protection stay mappings of their own */
		if (mmap(NULL, 4096, turn % 2 ? PROT_READ : PROT_NONE, MAP_PRIVATE, executable, 0) == MAP_FAILED)
			fail("mmap");
	close(executable);
	for (turn = 0; opened < descriptors - 3; turn++) { /* 3: the standard ones */
		int more = open_one(turn, descriptors - 3 - opened);

		if (more < 0)
			fail("open");
		opened += more;
	}
	if (write(ready, "x", 1) != 1)
		_exit(1);
	close(ready);
	for (;;)
		pause();
}

int main(int argc, char **argv)
{
	int ready[2], count, processes;
	char byte;

	if (argc != 4) {
		fprintf(stderr, "crowd PROCESSES DESCRIPTORS MAPPINGS\n");
		return 2;
	}
	processes = atoi(argv[1]);
	if (pipe(ready) < 0)
		fail("pipe");
	for (count = 0; count < processes; count++) {
		pid_t child = fork();

		if (child < 0)
			fail("fork");
		if (child == 0) {
			close(ready[0]);
			live(atoi(argv[2]), atoi(argv[3]), ready[1]);
		}
	}
	close(ready[1]);
	for (count = 0; count < processes; count++)
		if (read(ready[0], &byte, 1) != 1)
			fail("a process of the crowd");
	puts("ready");
	fflush(stdout);
	while (read(STDIN_FILENO, &byte, 1) > 0)
		;
	return 0;
}

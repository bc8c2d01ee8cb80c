/* See state.h. Everything is read anew at every call, so that a test changes the machine under a running program. */
#define _GNU_SOURCE
#include "state.h"

#include "json.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

enum { STATE_SIZE = 1 << 18 };

/* A simulation that cannot do what the test asked for must not look like one that can. */
static void broken(const char *what)
{
    fprintf(stderr, "gpusim: cannot %s: %m\n", what);
    abort();
}

/* The directory that this library was loaded from, so that no environment variable is needed. */
static int open_beside(const char *name, int flags)
{
    Dl_info self;
    char path[PATH_MAX];
    if (!dladdr((void *)open_beside, &self) || !realpath(self.dli_fname, path))
        broken("find its own library");
    snprintf(strrchr(path, '/') + 1, (size_t)(path + sizeof path - strrchr(path, '/') - 1), "%s", name);
    return open(path, flags | O_CLOEXEC, 0666);
}

const char *state_load(void)
{
    static _Thread_local char text[STATE_SIZE];
    int file = open_beside("gpusim.json", O_RDONLY);
    if (file < 0)
        return NULL;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0 || length == sizeof text - 1)
        broken("read gpusim.json");
    text[length] = '\0';
    return text;
}

/* From here SIGKILL does not end this process until the cgroup is thawed, as in a driver that never answers. */
static void freeze(const char *cgroup)
{
    char path[PATH_MAX];
    json_text(cgroup, path, sizeof path - sizeof "/cgroup.procs");
    int file = open(strcat(path, "/cgroup.procs"), O_WRONLY | O_CLOEXEC);
    if (file < 0 || write(file, "0", 1) != 1)
        broken("enter the frozen cgroup");
    close(file);
}

unsigned int state_fault(const char *state, const char *scope, const char *function)
{
    bool unkillable = json_contains(json_get(scope, "unkillable"), function);
    if (unkillable)
        freeze(json_get(state, "freezer"));
    while (unkillable || json_contains(json_get(scope, "hang"), function))
        pause();
    usleep((unsigned int)json_number(json_get(json_get(scope, "slow_ms"), function), 0) * 1000);
    return (unsigned int)json_number(json_get(json_get(scope, "errors"), function), 0);
}

/* A record counts while its writer lives: the kernel drops the lock with the process, and names the owner as this
 * process's own PID namespace sees it. */
static bool read_record(int directory, const char *name, struct record *record)
{
    char text[UUID_SIZE + 64] = "";
    char attribution[16] = "";
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    int file = openat(directory, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (file < 0)
        return false;
    bool live = !fcntl(file, F_GETLK, &lock) && lock.l_type != F_UNLCK && read(file, text, sizeof text - 1) > 0;
    close(file);
    record->pid = live && lock.l_pid > 0 ? (unsigned int)lock.l_pid : 0;
    int fields = sscanf(text, "%95s %llu %c %15s", record->uuid, &record->bytes, &record->type, attribution);
    record->unknown = !strcmp(attribution, "unknown");
    return live && fields >= 3;
}

int state_records(struct record *records)
{
    int count = 0;
    int directory = open_beside("memory", O_RDONLY | O_DIRECTORY);
    DIR *listing = directory < 0 ? NULL : fdopendir(directory);
    if (!listing)
        broken("list memory/");
    for (struct dirent *entry; (entry = readdir(listing)) && count < MAX_RECORDS;)
        if (entry->d_name[0] != '.' && read_record(directory, entry->d_name, &records[count]))
            count++;
    closedir(listing);
    return count;
}

/* The position is kept in a file, since a careful program reads every round in a child of its own. */
unsigned long long state_flicker(const char *uuid, const char *values)
{
    char name[UUID_SIZE + 8];
    int position = 0;
    snprintf(name, sizeof name, "served/%s", uuid);
    int file = open_beside(name, O_RDWR | O_CREAT);
    if (file < 0 || flock(file, LOCK_EX))
        broken("count the figures served");
    if (pread(file, &position, sizeof position, 0) != sizeof position)
        position = 0;
    const char *value = json_at(values, position);
    int following = position + (value ? 1 : 0);
    if (pwrite(file, &following, sizeof following, 0) != sizeof following)
        broken("count the figures served");
    close(file);
    return json_number(value ? value : json_at(values, json_count(values) - 1), 0);
}

/* The library's life, the list of devices, and the handles. */
#include "device.h"

#include "json.h"
#include "state.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static struct device handles[MAX_GPUS][1 + MAX_MIG];
static int visible[MAX_GPUS], visible_count;
static int nodes[MAX_GPUS + 1], node_count;
static int users;
static pthread_mutex_t life = PTHREAD_MUTEX_INITIALIZER;

nvmlDevice_t device_handle(int gpu, int mig)
{
    struct device *handle = &handles[gpu][mig + 1];
    *handle = (struct device){.gpu = gpu, .mig = mig};
    return handle;
}

const char *device_gpu(const char *state, nvmlDevice_t device)
{
    return json_at(json_get(state, "gpus"), device->gpu);
}

const char *device_mig(const char *state, nvmlDevice_t device)
{
    return device->mig == WHOLE ? NULL : json_at(json_get(device_gpu(state, device), "mig"), device->mig);
}

const char *device_object(const char *state, nvmlDevice_t device)
{
    return device->mig == WHOLE ? device_gpu(state, device) : device_mig(state, device);
}

static bool is_handle(nvmlDevice_t device)
{
    return device >= &handles[0][0] && device <= &handles[MAX_GPUS - 1][MAX_MIG];
}

nvmlReturn_t enter(const char *function, const char **state)
{
    *state = state_load();
    if (!*state)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    nvmlReturn_t fault = state_fault(*state, *state, function);
    return fault ? fault : users ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

nvmlReturn_t enter_device(const char *function, nvmlDevice_t device, const char **state)
{
    nvmlReturn_t fault = enter(function, state);
    if (fault)
        return fault;
    if (!is_handle(device) || !device_object(*state, device))
        return NVML_ERROR_INVALID_ARGUMENT;
    fault = state_fault(*state, device_gpu(*state, device), function);
    return fault || device->mig == WHOLE ? fault : state_fault(*state, device_mig(*state, device), function);
}

nvmlReturn_t copy_text(const char *value, char *to, unsigned int size)
{
    char text[128];
    json_text(value, text, sizeof text);
    if (strlen(text) >= size)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, text);
    return NVML_SUCCESS;
}

/* The real library holds the nodes of the control device and of every GPU from nvmlInit to nvmlShutdown. */
static bool open_node(const char *state, const char *name)
{
    char directory[256], path[300];
    json_text(json_get(state, "dev"), directory, sizeof directory);
    snprintf(path, sizeof path, "%s/%s", directory, name);
    int node = open(path, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (node >= 0)
        nodes[node_count++] = node;
    return node >= 0;
}

/* A GPU whose node is not there or refused is left out, as in a container that was given fewer. */
static void enumerate(const char *state)
{
    const char *gpus = json_get(state, "gpus");
    char name[32];
    visible_count = node_count = 0;
    open_node(state, "nvidiactl");
    for (int gpu = 0; gpu < MAX_GPUS && json_at(gpus, gpu); gpu++) {
        const char *object = json_at(gpus, gpu);
        snprintf(name, sizeof name, "nvidia%llu", json_number(json_get(object, "minor"), 0));
        if (!json_number(json_get(object, "missing"), 0) && open_node(state, name))
            visible[visible_count++] = gpu;
    }
}

/* Either name of nvmlInit has the faults of "nvmlInit_v2". */
nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    const char *state = state_load();
    nvmlReturn_t fault = state ? state_fault(state, state, "nvmlInit_v2") : NVML_ERROR_DRIVER_NOT_LOADED;
    if (fault)
        return fault;
    pthread_mutex_lock(&life);
    if (users++ == 0)
        enumerate(state);
    pthread_mutex_unlock(&life);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void)
{
    ENTER(state);
    pthread_mutex_lock(&life);
    if (--users == 0)
        while (node_count)
            close(nodes[--node_count]);
    pthread_mutex_unlock(&life);
    return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    static const struct {
        unsigned int code;
        const char *text;
    } texts[] = {
        {0, "Success"}, {1, "Uninitialized"}, {2, "Invalid Argument"}, {3, "Not Supported"},
        {4, "Insufficient Permissions"}, {6, "Not Found"}, {7, "Insufficient Size"}, {9, "Driver Not Loaded"},
        {10, "Timeout"}, {13, "Function Not Found"}, {15, "GPU is lost"}, {16, "GPU requires reset"},
        {17, "The operating system has blocked the request"}, {18, "Driver/library version mismatch"},
        {27, "Not Ready"}, {28, "GPU not found"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (texts[i].code == result)
            return texts[i].text;
    return "Unknown Error";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    ENTER(state);
    return copy_text(json_get(state, "driver_version"), version, length);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    ENTER(state);
    *count = (unsigned int)visible_count;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    ENTER(state);
    if (index >= (unsigned int)visible_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = device_handle(visible[index], WHOLE);
    return state_fault(state, device_gpu(state, *device), __func__);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    ENTER(state);
    for (int i = 0; i < visible_count; i++)
        for (int mig = WHOLE; mig < MAX_MIG; mig++) {
            *device = device_handle(visible[i], mig);
            if (json_is(json_get(device_object(state, *device), "uuid"), uuid))
                return state_fault(state, device_object(state, *device), __func__);
        }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    ENTER_DEVICE(state, device);
    *index = device->mig == WHOLE ? 0 : (unsigned int)device->mig;
    for (int i = 0; device->mig == WHOLE && i < visible_count; i++)
        if (visible[i] == device->gpu)
            *index = (unsigned int)i;
    return NVML_SUCCESS;
}

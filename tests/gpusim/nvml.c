/* libnvidia-ml.so.1 of a machine that has no GPU: what NVML says of one device, from gpusim.json and live processes.
 *
 * As in the real library: version 1 of the memory figures counts the driver's reservation as used, version 2 does not;
 * a GPU with MIG instances reports their processes too; process lists are asked for twice, for the size and again. */
#include "device.h"
#include "json.h"
#include "state.h"

#include <stdio.h>
#include <string.h>

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    ENTER_DEVICE(state, device);
    return copy_text(json_get(device_object(state, device), "uuid"), uuid, length);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    ENTER_DEVICE(state, device);
    return copy_text(json_get(device_object(state, device), "name"), name, length);
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    ENTER_DEVICE(state, device);
    *minor = (unsigned int)json_number(json_get(device_gpu(state, device), "minor"), 0);
    return device->mig == WHOLE ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    ENTER_DEVICE(state, device);
    memset(pci, 0, sizeof *pci);
    copy_text(json_get(device_gpu(state, device), "pci"), pci->busId, sizeof pci->busId);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%.12s", pci->busId + 4);
    sscanf(pci->busId, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned int *mode)
{
    ENTER_DEVICE(state, device);
    *mode = 1;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, int *node)
{
    ENTER_DEVICE(state, device);
    const char *value = json_get(device_gpu(state, device), "numa_node");
    *node = (int)json_number(value, 0);
    return value ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *fields)
{
    ENTER_DEVICE(state, device);
    for (int i = 0; i < count; i++) {
        fields[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
        if (fields[i].fieldId != NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
            continue;
        fields[i].nvmlReturn = NVML_SUCCESS;
        fields[i].valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
        fields[i].value.uiVal = (unsigned int)json_number(json_get(device_gpu(state, device), "recovery_action"), 0);
    }
    return NVML_SUCCESS;
}

/* ---- MIG ---- */

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    ENTER_DEVICE(state, device);
    *current = *pending = json_count(json_get(device_gpu(state, device), "mig")) > 0;
    return device->mig == WHOLE ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    ENTER_DEVICE(state, device);
    *count = json_count(json_get(device_gpu(state, device), "mig")) ? MAX_MIG : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *instance)
{
    ENTER_DEVICE(state, device);
    if (device->mig != WHOLE || index >= MAX_MIG)
        return NVML_ERROR_INVALID_ARGUMENT;
    *instance = device_handle(device->gpu, (int)index);
    const char *object = device_object(state, *instance);
    return object ? (nvmlReturn_t)state_fault(state, object, __func__) : NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig)
{
    ENTER_DEVICE(state, device);
    *is_mig = device->mig != WHOLE;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t instance, nvmlDevice_t *device)
{
    ENTER_DEVICE(state, instance);
    *device = device_handle(instance->gpu, WHOLE);
    return instance->mig == WHOLE ? NVML_ERROR_INVALID_ARGUMENT : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    ENTER_DEVICE(state, device);
    *id = (unsigned int)device->mig + 1; /* GPU instance 0 is the one that spans the whole GPU */
    return device->mig == WHOLE ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    ENTER_DEVICE(state, device);
    *id = 0;
    return device->mig == WHOLE ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

/* ---- memory ---- */

/* The MIG instance of a GPU that a record belongs to; WHOLE for the GPU itself. */
static bool find_record(const char *gpu, const struct record *record, int *mig)
{
    const char *instances = json_get(gpu, "mig");
    for (*mig = 0; json_at(instances, *mig); ++*mig)
        if (json_is(json_get(json_at(instances, *mig), "uuid"), record->uuid))
            return true;
    *mig = WHOLE;
    return json_is(json_get(gpu, "uuid"), record->uuid);
}

static bool is_on(const char *state, nvmlDevice_t device, const struct record *record, int *mig)
{
    return find_record(device_gpu(state, device), record, mig) && (device->mig == WHOLE || device->mig == *mig);
}

static unsigned long long idle_bytes(const char *object)
{
    return json_number(json_get(object, "base_bytes"), 0) + json_number(json_get(object, "residual_bytes"), 0);
}

static unsigned long long used_bytes(const char *state, nvmlDevice_t device)
{
    static _Thread_local struct record records[MAX_RECORDS];
    const char *object = device_object(state, device), *instances = json_get(object, "mig");
    char uuid[UUID_SIZE];
    json_text(json_get(object, "uuid"), uuid, sizeof uuid);
    if (json_get(object, "flicker"))
        return state_flicker(uuid, json_get(object, "flicker"));
    unsigned long long used = idle_bytes(object);
    for (int mig = 0; json_at(instances, mig); mig++)
        used += idle_bytes(json_at(instances, mig));
    for (int i = state_records(records) - 1, mig; i >= 0; i--)
        if (is_on(state, device, &records[i], &mig))
            used += records[i].bytes;
    return used;
}

static nvmlMemory_v2_t memory_of(const char *state, nvmlDevice_t device)
{
    const char *object = device_object(state, device);
    nvmlMemory_v2_t memory = {
        .total = json_number(json_get(object, "total_bytes"), 0),
        .reserved = json_number(json_get(object, "reserved_bytes"), 0),
        .used = used_bytes(state, device),
    };
    memory.free = memory.total - memory.reserved - memory.used;
    return memory;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    ENTER_DEVICE(state, device);
    nvmlMemory_v2_t now = memory_of(state, device);
    *memory = (nvmlMemory_t){.total = now.total, .free = now.free, .used = now.used + now.reserved};
    return NVML_SUCCESS;
}

#ifndef NO_MEMORY_V2 /* drivers before 510 */
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    ENTER_DEVICE(state, device);
    if (memory->version != nvmlMemory_v2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    *memory = memory_of(state, device);
    memory->version = nvmlMemory_v2;
    return NVML_SUCCESS;
}
#endif

/* ---- processes ---- */

static void add_process(nvmlProcessInfo_t *found, int *count, nvmlProcessInfo_t process)
{
    for (int i = 0; i < *count; i++)
        if (found[i].pid == process.pid && found[i].gpuInstanceId == process.gpuInstanceId) {
            found[i].usedGpuMemory += process.usedGpuMemory;
            return;
        }
    found[(*count)++] = process;
}

/* The live processes of one type, and the compute list's ghosts: pids that the driver still lists though they died. */
static int find_processes(const char *state, nvmlDevice_t device, char type, nvmlProcessInfo_t *found)
{
    static _Thread_local struct record records[MAX_RECORDS];
    const char *ghosts = type == 'C' ? json_get(device_object(state, device), "ghosts") : NULL;
    int count = 0;
    for (int i = state_records(records) - 1, mig; i >= 0; i--)
        if (records[i].type == type && records[i].pid && is_on(state, device, &records[i], &mig))
            add_process(found, &count,
                        (nvmlProcessInfo_t){
                            .pid = records[i].pid,
                            .usedGpuMemory = records[i].unknown ? NVML_VALUE_NOT_AVAILABLE : records[i].bytes,
                            .gpuInstanceId = mig == WHOLE ? NVML_NO_INSTANCE : (unsigned int)mig + 1,
                            .computeInstanceId = mig == WHOLE ? NVML_NO_INSTANCE : 0,
                        });
    for (int i = 0; json_at(ghosts, i) && count < MAX_RECORDS; i++)
        found[count++] = (nvmlProcessInfo_t){
            .pid = (unsigned int)json_number(json_at(ghosts, i), 0),
            .usedGpuMemory = NVML_VALUE_NOT_AVAILABLE,
            .gpuInstanceId = NVML_NO_INSTANCE,
            .computeInstanceId = NVML_NO_INSTANCE,
        };
    return count;
}

static nvmlReturn_t list_processes(const char *state, nvmlDevice_t device, char type, unsigned int *count,
                                   nvmlProcessInfo_t *infos)
{
    static _Thread_local nvmlProcessInfo_t found[MAX_RECORDS];
    unsigned int room = *count;
    *count = (unsigned int)find_processes(state, device, type, found);
    if (*count > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    if (*count)
        memcpy(infos, found, *count * sizeof *found);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos)
{
    ENTER_DEVICE(state, device);
    return list_processes(state, device, 'C', count, infos);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                      nvmlProcessInfo_t *infos)
{
    ENTER_DEVICE(state, device);
    return list_processes(state, device, 'G', count, infos);
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                        nvmlProcessInfo_t *infos)
{
    ENTER_DEVICE(state, device);
    return list_processes(state, device, 'M', count, infos);
}

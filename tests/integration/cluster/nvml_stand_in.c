/* Stands in for NVIDIA's libnvidia-ml.so.1 on a machine without a GPU: two H100s joined by NVLink.
 *
 * GPU 1 is unwell: slowed by its power limit, with four of its sixteen lanes, a memory error that was
 * not corrected, and a process on it. What is not here is a function that an older driver has not.
 *
 * By environment: NO_DRIVER, a driver that is not loaded; GPU_NAME and GPU_CAPABILITY (like 12.0), other
 * cards; GPU_1_NAME, another GPU 1; GPU_WELL, GPU 1 is well too; GPU_MIG, GPU 0 is divided into two MIG slices.
 *
 * By the file NVML_STATE, lines of a key and a number, which a test may replace at any time: init, an error of
 * nvmlInit; unloaded, the driver is gone; count, of GPUs; lost0 and lost1; gpm, 0 without GPM; nan, GPM measures
 * nothing; events, 0 without events; xid0 and xid1, the newest XID; temperature1; nvlink_tx in KiB; hang, no call
 * ends; pid, of the process on GPU 1; refuse, the error of each question but which GPUs there are and their names.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
  SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
  DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15
};

static const char gpus[2], slices[2];

/* The number of a key in NVML_STATE; the file is read again when it was replaced. */
static long setting(const char *key, long otherwise) {
  static _Thread_local char text[4096];
  static _Thread_local struct stat read;
  const char *path = getenv("NVML_STATE");
  struct stat now;
  char name[32];
  long number;
  if (!path || stat(path, &now)) return otherwise;
  if (now.st_ino != read.st_ino || now.st_mtim.tv_sec != read.st_mtim.tv_sec || now.st_mtim.tv_nsec != read.st_mtim.tv_nsec) {
    FILE *file = fopen(path, "r");
    if (!file) return otherwise;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    read = now;
  }
  for (const char *line = text; sscanf(line, "%31s %ld", name, &number) == 2; line++) {
    if (!strcmp(name, key)) return number;
    if (!(line = strchr(line, '\n'))) break;
  }
  return otherwise;
}

/* What each question about a device begins with. */
static int unreachable(const void *device) {
  while (setting("hang", 0)) usleep(10000);
  if (setting("unloaded", 0)) return UNINITIALIZED;
  return setting(device == &gpus[1] ? "lost1" : "lost0", 0) ? GPU_IS_LOST : SUCCESS;
}
#define FIND(device) do { int error = unreachable(device); if (error) return error; } while (0)
#define REACH(device) do { FIND(device); int refused = (int)setting("refuse", 0); if (refused) return refused; } while (0)

static int second(const void *device) { return device == &gpus[1] && !getenv("GPU_WELL"); }

static int put(char *text, unsigned size, const char *value) {
  strncpy(text, value, size);
  return SUCCESS;
}

static int put_number(unsigned *number, unsigned value) {
  *number = value;
  return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  return getenv("NO_DRIVER") ? DRIVER_NOT_LOADED : (int)setting("init", SUCCESS);
}
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "?"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { return put(text, size, "580.65.06"); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return put_number((unsigned *)version, 13000); }
int nvmlDeviceGetCount_v2(unsigned *count) {
  if (setting("unloaded", 0)) return UNINITIALIZED;
  return put_number(count, (unsigned)setting("count", 2));
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, const void **device) {
  if (index > 1) return NOT_FOUND;
  FIND(&gpus[index]);
  *device = &gpus[index];
  return SUCCESS;
}
static int is_slice(const void *device) { return device == &slices[0] || device == &slices[1]; }
int nvmlDeviceGetName(void *device, char *text, unsigned size) {
  FIND(device);
  const char *name = getenv(device == &gpus[1] && getenv("GPU_1_NAME") ? "GPU_1_NAME" : "GPU_NAME");
  if (is_slice(device)) return put(text, size, "NVIDIA H100 80GB HBM3 MIG 3g.40gb");
  return put(text, size, name ? name : "NVIDIA H100 80GB HBM3");
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
  FIND(device);
  if (is_slice(device)) return put(text, size, device == &slices[0] ? "MIG-a1" : "MIG-a2");
  return put(text, size, device == &gpus[1] ? "GPU-b" : "GPU-a");
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
  REACH(device);
  const char *capability = getenv("GPU_CAPABILITY");
  (void)device;
  *major = capability ? atoi(capability) : 9;
  *minor = capability ? atoi(strchr(capability, '.') + 1) : 0;
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(void *device, uint64_t *memory) {
  REACH(device);
  memory[0] = is_slice(device) ? 40ull << 30 : 80ull << 30;
  memory[2] = second(device) ? 20ull << 30 : 1ull << 30;
  memory[1] = memory[0] - memory[2];
  return SUCCESS;
}
struct pci {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char address[32];
};
int nvmlDeviceGetPciInfo_v3(void *device, struct pci *pci) {
  REACH(device);
  return put(pci->address, sizeof pci->address, device == &gpus[1] ? "00000000:02:00.0" : "00000000:01:00.0");
}
int nvmlDeviceGetPersistenceMode(void *device, unsigned *mode) {
  REACH(device);
  (void)device;
  return put_number(mode, 1);
}
int nvmlDeviceGetEccMode(void *device, unsigned *now, unsigned *later) {
  REACH(device);
  (void)device;
  *later = 1;
  return put_number(now, 1);
}
int nvmlDeviceGetTotalEccErrors(void *device, unsigned kind, unsigned counter, uint64_t *count) {
  REACH(device);
  *count = second(device) && kind == 1 && counter == 0;
  return SUCCESS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, uint64_t *reasons) {
  REACH(device);
  *reasons = second(device) ? 0x4 : 0x1; /* power limit; idle */
  return SUCCESS;
}
int nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *celsius) {
  REACH(device);
  (void)sensor;
  return put_number(celsius, second(device) ? (unsigned)setting("temperature1", 71) : 35);
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
  REACH(device);
  return put_number(milliwatts, second(device) ? 350000 : 70000);
}
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *milliwatts) {
  REACH(device);
  (void)device;
  return put_number(milliwatts, 350000);
}
int nvmlDeviceGetClockInfo(void *device, unsigned kind, unsigned *mhz) {
  REACH(device);
  (void)kind;
  return put_number(mhz, second(device) ? 1200 : 345);
}
int nvmlDeviceGetMaxClockInfo(void *device, unsigned kind, unsigned *mhz) {
  REACH(device);
  (void)device, (void)kind;
  return put_number(mhz, 1980);
}
typedef struct {
  unsigned gpu, memory;
} Rates;
int nvmlDeviceGetUtilizationRates(void *device, Rates *rates) {
  REACH(device);
  rates->gpu = second(device) ? 93 : 0;
  rates->memory = second(device) ? 40 : 0;
  return 0;
}
int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned *lanes) {
  REACH(device);
  return put_number(lanes, second(device) ? 4 : 16);
}
int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned *lanes) {
  REACH(device);
  (void)device;
  return put_number(lanes, 16);
}
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *later) {
  REACH(device);
  if (!getenv("GPU_MIG")) return NOT_SUPPORTED;
  *later = device == &gpus[0];
  return put_number(now, device == &gpus[0]);
}
int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
  REACH(device);
  return put_number(count, device == &gpus[0] ? 7 : 0);
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned place, const void **slice) {
  REACH(device);
  (void)device;
  if (place != 1 && place != 2) return NOT_FOUND; /* free places are not the last ones */
  *slice = &slices[place - 1];
  return SUCCESS;
}
struct process {
  unsigned pid;
  uint64_t memory;
  unsigned gpu_instance, compute_instance;
};
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *found) {
  REACH(device);
  unsigned room = *count;
  int in_slice = getenv("GPU_MIG") && (device == &gpus[0] || device == &slices[0]);
  if (!second(device) && !in_slice) return put_number(count, 0);
  *count = 1;
  if (!found || room < 1) return INSUFFICIENT_SIZE;
  found[0] = (struct process){(unsigned)setting("pid", getpid()), 20ull << 30, 0, 0};
  return SUCCESS;
}
int nvmlDeviceGetP2PStatus(void *one, void *two, unsigned kind, unsigned *status) {
  return put_number(status, kind == 2 && one != two ? 0 : 1);
}

struct memory_v2 {
  unsigned version;
  uint64_t total, reserved, free, used;
};
int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *memory) {
  uint64_t first[3];
  int error = nvmlDeviceGetMemoryInfo(device, first);
  if (memory->version != (sizeof *memory | 2 << 24)) return INVALID_ARGUMENT;
  memory->total = first[0];
  memory->reserved = 512ull << 20;
  memory->used = first[2];
  memory->free = first[0] - first[2] - memory->reserved;
  return error;
}
int nvmlDeviceGetMinorNumber(void *device, unsigned *minor) {
  REACH(device);
  return put_number(minor, device == &gpus[1] ? 3 : 2); /* which need not be the index */
}
int nvmlDeviceGetGpuInstanceId(void *device, unsigned *number) {
  REACH(device);
  return is_slice(device) ? put_number(number, device == &slices[0] ? 1 : 2) : NOT_SUPPORTED;
}
int nvmlDeviceGetPcieThroughput(void *device, unsigned way, unsigned *kib) {
  REACH(device);
  return put_number(kib, way ? 700 : 500);
}

typedef struct {
  uint32_t id, scope;
  int64_t when, took;
  unsigned type;
  int result;
  union {
    unsigned small;
    uint64_t large;
  } value;
} Field;
static void fill(Field *field, const void *device) {
  field->result = SUCCESS;
  field->type = 1;
  if (field->id == 82) field->value.small = second(device) ? 68 : 33;
  else if (field->id == 94) field->value.small = second(device) ? 12 : 0;
  else {
    field->type = 3;
    if (field->id == 83) field->value.large = second(device) ? 5000000123ull : 7000;
    else if ((field->id == 138 || field->id == 139) && field->scope == 0xFFFFFFFF)
      field->value.large = field->id == 138 ? (uint64_t)setting("nvlink_tx", 1000) : 3000;
    else field->result = NOT_SUPPORTED;
  }
}
int nvmlDeviceGetFieldValues(void *device, int count, Field *fields) {
  REACH(device);
  for (int place = 0; place < count; place++) fill(&fields[place], device);
  return SUCCESS;
}

/* GPM: a sample knows its place in time, and the older must be the first. */
typedef struct {
  long place, instance;
} Sample;
static long samples;
int nvmlGpmQueryDeviceSupport(void *device, unsigned *support) {
  REACH(device);
  return put_number(&support[1], (unsigned)setting("gpm", 1));
}
int nvmlGpmSampleAlloc(Sample **sample) {
  *sample = calloc(1, sizeof **sample);
  return SUCCESS;
}
int nvmlGpmSampleFree(Sample *sample) {
  free(sample);
  return SUCCESS;
}
int nvmlGpmSampleGet(void *device, Sample *sample) {
  REACH(device);
  *sample = (Sample){++samples, 0};
  return SUCCESS;
}
int nvmlGpmMigSampleGet(void *device, unsigned instance, Sample *sample) {
  REACH(device);
  *sample = (Sample){++samples, instance};
  return SUCCESS;
}
struct measured {
  unsigned version, count;
  const Sample *before, *after;
  struct {
    unsigned id;
    int result;
    double value;
    const char *about[3];
  } metrics[477];
};
int nvmlGpmMetricsGet(struct measured *measured) {
  static const struct { unsigned id; double value; } known[] = {
    {1, 97.0}, {2, 62.5}, {5, 41.0}, {10, 30.25}, {20, 100.0}, {21, 200.0}, {60, 400.0}, {61, 300.0}
  };
  if (measured->version != 1 || measured->before->place >= measured->after->place) return INVALID_ARGUMENT;
  for (unsigned place = 0; place < measured->count; place++) {
    measured->metrics[place].result = NOT_SUPPORTED;
    for (unsigned each = 0; each < sizeof known / sizeof *known; each++)
      if (known[each].id == measured->metrics[place].id) {
        measured->metrics[place].result = SUCCESS;
        measured->metrics[place].value = known[each].value - 10 * measured->after->instance;
        if (setting("nan", 0)) measured->metrics[place].value = __builtin_nan("");
      }
  }
  return SUCCESS;
}

struct event {
  const void *device;
  uint64_t type, number;
  unsigned gpu_instance, compute_instance;
};
int nvmlEventSetCreate(const void **set) {
  static const char only;
  *set = &only;
  return SUCCESS;
}
int nvmlEventSetFree(const void *set) {
  (void)set;
  return SUCCESS;
}
int nvmlDeviceGetSupportedEventTypes(void *device, uint64_t *types) {
  REACH(device);
  *types = setting("events", 1) ? 8 : 0;
  return SUCCESS;
}
int nvmlDeviceRegisterEvents(void *device, uint64_t types, const void *set) {
  (void)types, (void)set;
  REACH(device);
  return SUCCESS;
}
int nvmlEventSetWait_v2(const void *set, struct event *event, unsigned timeout_ms) {
  static long told[2];
  (void)set, (void)timeout_ms;
  for (int index = 0; index < 2; index++) {
    long newest = setting(index ? "xid1" : "xid0", 0);
    if (newest == told[index]) continue;
    told[index] = newest;
    *event = (struct event){&gpus[index], 8, (uint64_t)newest, 0, 0};
    return SUCCESS;
  }
  return TIMEOUT;
}

/* Stands in for NVIDIA's libnvidia-ml.so.1 on a machine without a GPU: two H100s joined by NVLink.
 *
 * GPU 1 is unwell: slowed by its power limit, with four of its sixteen lanes, a memory error that was
 * not corrected, and a process on it. What is not here is a function that an older driver has not.
 *
 * By environment: NO_DRIVER, a driver that is not loaded; GPU_NAME and GPU_CAPABILITY (like 12.0), other
 * cards; GPU_1_NAME, another GPU 1; GPU_WELL, GPU 1 is well too; GPU_MIG, GPU 0 is divided into two MIG slices.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };

static const char gpus[2], slices[2];

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
  return getenv("NO_DRIVER") ? DRIVER_NOT_LOADED : SUCCESS;
}
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "?"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { return put(text, size, "580.65.06"); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return put_number((unsigned *)version, 13000); }
int nvmlDeviceGetCount_v2(unsigned *count) { return put_number(count, 2); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, const void **device) {
  if (index > 1) return NOT_FOUND;
  *device = &gpus[index];
  return SUCCESS;
}
static int is_slice(const void *device) { return device == &slices[0] || device == &slices[1]; }
int nvmlDeviceGetName(void *device, char *text, unsigned size) {
  const char *name = getenv(device == &gpus[1] && getenv("GPU_1_NAME") ? "GPU_1_NAME" : "GPU_NAME");
  if (is_slice(device)) return put(text, size, "NVIDIA H100 80GB HBM3 MIG 3g.40gb");
  return put(text, size, name ? name : "NVIDIA H100 80GB HBM3");
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
  if (is_slice(device)) return put(text, size, device == &slices[0] ? "MIG-a1" : "MIG-a2");
  return put(text, size, device == &gpus[1] ? "GPU-b" : "GPU-a");
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
  const char *capability = getenv("GPU_CAPABILITY");
  (void)device;
  *major = capability ? atoi(capability) : 9;
  *minor = capability ? atoi(strchr(capability, '.') + 1) : 0;
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(void *device, uint64_t *memory) {
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
  return put(pci->address, sizeof pci->address, device == &gpus[1] ? "00000000:02:00.0" : "00000000:01:00.0");
}
int nvmlDeviceGetPersistenceMode(void *device, unsigned *mode) {
  (void)device;
  return put_number(mode, 1);
}
int nvmlDeviceGetEccMode(void *device, unsigned *now, unsigned *later) {
  (void)device;
  *later = 1;
  return put_number(now, 1);
}
int nvmlDeviceGetTotalEccErrors(void *device, unsigned kind, unsigned counter, uint64_t *count) {
  *count = second(device) && kind == 1 && counter == 0;
  return SUCCESS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, uint64_t *reasons) {
  *reasons = second(device) ? 0x4 : 0x1; /* power limit; idle */
  return SUCCESS;
}
int nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *celsius) {
  (void)sensor;
  return put_number(celsius, second(device) ? 71 : 35);
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
  return put_number(milliwatts, second(device) ? 350000 : 70000);
}
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *milliwatts) {
  (void)device;
  return put_number(milliwatts, 350000);
}
int nvmlDeviceGetClockInfo(void *device, unsigned kind, unsigned *mhz) {
  (void)kind;
  return put_number(mhz, second(device) ? 1200 : 345);
}
int nvmlDeviceGetMaxClockInfo(void *device, unsigned kind, unsigned *mhz) {
  (void)device, (void)kind;
  return put_number(mhz, 1980);
}
typedef struct {
  unsigned gpu, memory;
} Rates;
int nvmlDeviceGetUtilizationRates(void *device, Rates *rates) {
  rates->gpu = second(device) ? 93 : 0;
  rates->memory = 0;
  return 0;
}
int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned *lanes) {
  return put_number(lanes, second(device) ? 4 : 16);
}
int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned *lanes) {
  (void)device;
  return put_number(lanes, 16);
}
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *later) {
  if (!getenv("GPU_MIG")) return NOT_SUPPORTED;
  *later = device == &gpus[0];
  return put_number(now, device == &gpus[0]);
}
int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
  return put_number(count, device == &gpus[0] ? 7 : 0);
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned place, const void **slice) {
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
  unsigned room = *count;
  if (!second(device)) return put_number(count, 0);
  *count = 1;
  if (!found || room < 1) return INSUFFICIENT_SIZE;
  found[0] = (struct process){(unsigned)getpid(), 20ull << 30, 0, 0};
  return SUCCESS;
}
int nvmlDeviceGetP2PStatus(void *one, void *two, unsigned kind, unsigned *status) {
  return put_number(status, kind == 2 && one != two ? 0 : 1);
}

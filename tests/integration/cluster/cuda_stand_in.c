/* Takes the place of NVIDIA's libcuda.so.1: a driver without a device, so that no test sees a real one.
 *
 * CUDA_DEVICE in the environment: with one device, which can only be counted.
 */
#include <stdlib.h>

int cuInit(unsigned flags) {
  (void)flags;
  return getenv("CUDA_DEVICE") ? 0 : 100; /* CUDA_ERROR_NO_DEVICE */
}
int cuDeviceGetCount(int *count) {
  *count = 1;
  return 0;
}

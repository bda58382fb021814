// Stands in for libnvidia-ml.so.1: how many GPUs there are, and that no fabric joins their memory.
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
constexpr int kSuccess = 0, kNotSupported = 3;
}

EXPORT int nvmlInit_v2() { return kSuccess; }
EXPORT int nvmlDeviceGetCount_v2(unsigned* count) { return *count = 2, kSuccess; }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  return *device = (void*)8, kSuccess;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned, void** device) { return *device = (void*)8, kSuccess; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = 13000, kSuccess; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(void*, void* info) {
  // After its version: the cluster, a status, the clique, and the state, 0 where there is no fabric.
  return memset((char*)info + 4, 0, 25), kSuccess;
}
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType() { return kNotSupported; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return kNotSupported; }
EXPORT int nvmlDeviceGetComputeRunningProcesses() { return kNotSupported; }
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3() { return kNotSupported; }

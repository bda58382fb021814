// Stands in for libcudart, libcublas, libnccl and parts of libcudnn where there is no GPU (LD_PRELOAD).
//
// Device memory is host memory that is mapped on first touch. Kernels do nothing. Streams and
// events are numbers. What torch asks for is written to a trace, one line a call; `trace.py` says
// what the lines mean. Values are whatever the memory holds.
#include <cuda_runtime_api.h>
#include <cudnn_graph.h>
#include <dlfcn.h>
#include <nccl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kDeviceBytes = 141ull << 30;  // an H200
constexpr size_t kMaxMoved = 1 << 20;          // larger copies between device memory move nothing
constexpr int kDevices = 2;
constexpr int kMultiprocessors = 132, kSharedBytes = 49152, kSharedBytesOptin = 232448;

struct Graph {
  int holders;  // itself, and what was made of it
  std::set<ncclComm_t> used;
};

struct State {
  std::recursive_mutex mutex;
  std::map<uintptr_t, Graph> graphs;
  std::set<ncclComm_t> captured;               // the communicators used since a capture began
  std::map<uintptr_t, size_t> device, pinned;  // start and bytes of what is allocated
  std::map<uintptr_t, size_t> registered;      // of what NCCL knows
  std::map<uintptr_t, int> owner;              // the device of each block
  std::map<const void*, std::string> kernels;  // names by host function
  size_t used = 0;
  uintptr_t next_handle = 0x100;
  uintptr_t capturing = 0;  // the stream that is being captured
  FILE* trace = nullptr;
  int launched_on = -1;
  bool events_complete = true;
};

State& state() {
  static auto* it = new State;  // outlives the static objects of torch
  return *it;
}

struct Locked {
  std::lock_guard<std::recursive_mutex> lock{state().mutex};
};

thread_local int current_device = 0;

void write_line(const char* format, ...) {
  Locked locked;
  if (!state().trace) return;
  va_list arguments;
  va_start(arguments, format);
  vfprintf(state().trace, format, arguments);
  va_end(arguments);
  fputc('\n', state().trace);
}

void note_device() {  // where the next launch goes, if the last went elsewhere
  Locked locked;
  if (state().launched_on == current_device) return;
  write_line("device %d", state().launched_on = current_device);
}

template <typename Handle>
cudaError_t new_handle(Handle* handle) {
  Locked locked;
  *handle = (Handle)(state().next_handle += 0x10);
  return cudaSuccess;
}

bool holds(const std::map<uintptr_t, size_t>& blocks, const void* pointer) {
  auto after = blocks.upper_bound((uintptr_t)pointer);
  if (after == blocks.begin()) return false;
  auto block = std::prev(after);
  return (uintptr_t)pointer < block->first + block->second;
}

size_t pages(size_t bytes) { return (bytes + 4095) & ~4095ull; }

}  // namespace

// -- the trace, for Python and for driver.cpp --------------------------------------------------

EXPORT void standin_trace(const char* path) {  // an empty path ends it
  Locked locked;
  if (state().trace) fclose(state().trace);
  state().trace = path && *path ? fopen(path, "w") : nullptr;
  state().launched_on = -1;
}
EXPORT void standin_note(const char* text) { write_line("%s", text); }
EXPORT void standin_events_complete(int whether) { state().events_complete = whether; }
EXPORT size_t standin_free_bytes() { return kDeviceBytes - state().used; }

// -- the device --------------------------------------------------------------------------------

EXPORT cudaError_t cudaGetDeviceCount(int* count) { return *count = kDevices, cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int device) { return current_device = device, cudaSuccess; }
EXPORT void standin_note_device() { note_device(); }

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* device, int) {
  memset(device, 0, sizeof *device);
  strcpy(device->name, "NVIDIA H200 (stand-in)");
  device->major = 9;
  device->totalGlobalMem = kDeviceBytes;
  device->multiProcessorCount = kMultiprocessors;
  device->sharedMemPerBlock = kSharedBytes;
  device->sharedMemPerBlockOptin = kSharedBytesOptin;
  device->sharedMemPerMultiprocessor = kSharedBytesOptin + 1024;
  device->reservedSharedMemPerBlock = 1024;
  device->regsPerBlock = device->regsPerMultiprocessor = device->totalConstMem = 65536;
  device->warpSize = 32;
  device->maxThreadsPerBlock = device->maxThreadsDim[0] = device->maxThreadsDim[1] = 1024;
  device->maxThreadsDim[2] = 64;
  device->maxThreadsPerMultiProcessor = 2048;
  device->maxBlocksPerMultiProcessor = 32;
  device->maxGridSize[0] = 2147483647;
  device->maxGridSize[1] = device->maxGridSize[2] = 65535;
  device->textureAlignment = 512;
  device->memoryBusWidth = 6144;
  device->l2CacheSize = 60 << 20;
  device->persistingL2CacheMaxSize = 37 << 20;
  device->concurrentKernels = device->unifiedAddressing = device->managedMemory = 1;
  device->cooperativeLaunch = device->canMapHostMemory = device->streamPrioritiesSupported = 1;
  device->asyncEngineCount = 3;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int) {
  static const std::map<int, int> values = {
      {cudaDevAttrComputeCapabilityMajor, 9},
      {cudaDevAttrComputeCapabilityMinor, 0},
      {cudaDevAttrMultiProcessorCount, kMultiprocessors},
      {cudaDevAttrMaxSharedMemoryPerBlock, kSharedBytes},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, kSharedBytesOptin},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, kSharedBytesOptin + 1024},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535},
      {cudaDevAttrMaxGridDimZ, 65535}};
  auto found = values.find(attribute);
  *value = found == values.end() ? 1 : found->second;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
EXPORT cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
  return snprintf(text, size, "0000:00:1e.0"), cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
EXPORT const char* cudaGetErrorString(cudaError_t) { return "an error of the stand-in"; }
EXPORT const char* cudaGetErrorName(cudaError_t) { return "standin"; }
EXPORT cudaError_t cudaDeviceSynchronize() { return write_line("sync device"), cudaSuccess; }

// -- memory ------------------------------------------------------------------------------------

EXPORT cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  Locked locked;
  State& now = state();
  size_t mapped = pages(bytes);
  if (now.used + mapped > kDeviceBytes) return cudaErrorMemoryAllocation;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  *pointer = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (*pointer == MAP_FAILED) return cudaErrorMemoryAllocation;
  now.device[(uintptr_t)*pointer] = mapped;
  now.owner[(uintptr_t)*pointer] = current_device;
  now.used += mapped;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFree(void* pointer) {
  Locked locked;
  State& now = state();
  auto block = now.device.find((uintptr_t)pointer);
  if (block == now.device.end()) return cudaSuccess;
  munmap(pointer, block->second);
  now.used -= block->second;
  now.device.erase(block);
  return cudaSuccess;
}
EXPORT void standin_map(uintptr_t start, size_t bytes, int device) {  // for driver.cpp
  Locked locked;
  state().device[start] = bytes;
  state().owner[start] = device;
  state().used += bytes;
}
EXPORT void standin_unmap(uintptr_t start) {
  Locked locked;
  auto block = state().device.find(start);
  if (block == state().device.end()) return;
  state().used -= block->second;
  state().device.erase(block);
}
EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  Locked locked;
  *pointer = aligned_alloc(4096, pages(bytes));
  state().pinned[(uintptr_t)*pointer] = bytes;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFreeHost(void* pointer) {
  Locked locked;
  state().pinned.erase((uintptr_t)pointer);
  free(pointer);
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  Locked locked;
  state().pinned[(uintptr_t)pointer] = bytes;
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  Locked locked;
  state().pinned.erase((uintptr_t)pointer);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  Locked locked;
  *total = kDeviceBytes;
  *free_bytes = kDeviceBytes - state().used;
  return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  Locked locked;
  memset(found, 0, sizeof *found);
  found->type = holds(state().device, pointer)   ? cudaMemoryTypeDevice
                : holds(state().pinned, pointer) ? cudaMemoryTypeHost
                                                 : cudaMemoryTypeUnregistered;
  found->devicePointer = found->hostPointer = (void*)pointer;
  auto after = state().owner.upper_bound((uintptr_t)pointer);
  if (found->type == cudaMemoryTypeDevice) found->device = std::prev(after)->second;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
  write_line("copy %p %p %p %zu %d", stream, to, from, bytes, (int)kind);
  if (bytes <= kMaxMoved || kind != cudaMemcpyDeviceToDevice) memcpy(to, from, bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  cudaMemcpyAsync(to, from, bytes, kind, 0);
  return write_line("sync copy"), cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t, size_t,
                                     size_t rows, cudaMemcpyKind kind, cudaStream_t stream) {
  return write_line("copy %p %p %p %zu %d", stream, to, from, to_pitch * rows, (int)kind), cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  write_line("fill %p %p %zu", stream, to, bytes);
  if (bytes <= kMaxMoved) memset(to, value, bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, 0);
}

// -- streams and events ------------------------------------------------------------------------

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return new_handle(stream);
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) { return new_handle(stream); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return new_handle(stream); }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return write_line("sync stream %p", stream), cudaSuccess;
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return write_line("wait %p %p", stream, event), cudaSuccess;
}
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return new_handle(event); }
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return new_handle(event); }
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return write_line("record %p %p", stream, event), cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return write_line("sync event %p", event), cudaSuccess;
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (!state().events_complete) return cudaErrorNotReady;
  return write_line("seen %p", event), cudaSuccess;
}
EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  return *milliseconds = 0.01f, cudaSuccess;
}

// -- CUDA graphs: what is captured is written to the trace once, a replay is one line -------------

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  state().capturing = (uintptr_t)stream;
  state().captured.clear();
  return write_line("capture %p", stream), cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  state().capturing = 0;
  new_handle(graph);
  Locked locked;
  state().graphs[(uintptr_t)*graph] = {1, state().captured};
  return write_line("captured %p %p", stream, *graph), cudaSuccess;
}
namespace {
cudaError_t drop_graph(void* graph) {
  Locked locked;
  auto found = state().graphs.find((uintptr_t)graph);
  if (found != state().graphs.end() && !--found->second.holders) state().graphs.erase(found);
  return cudaSuccess;
}
}  // namespace
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return drop_graph(graph); }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return drop_graph(graph); }
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  bool is = state().capturing && state().capturing == (uintptr_t)stream;
  *status = is ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* id, cudaGraph_t* graph,
                                            const cudaGraphNode_t** nodes,
                                            const cudaGraphEdgeData** edges, size_t* count) {
  if (id) *id = 1;
  if (graph) *graph = (cudaGraph_t)0x8;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph,
                                                 unsigned long long) {
  Locked locked;
  state().graphs[(uintptr_t)graph].holders++;
  return *made = (cudaGraphExec_t)graph, cudaSuccess;
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  return write_line("replay %p %p", stream, graph), cudaSuccess;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  return *count = 1, cudaSuccess;
}

// -- kernels -----------------------------------------------------------------------------------

namespace {
cudaError_t launch(const void* function, cudaStream_t stream) {
  Locked locked;
  auto found = state().kernels.find(function);
  const char* name = found == state().kernels.end() ? "unknown" : found->second.c_str();
  note_device();
  return write_line("kernel %p %s", stream, name), cudaSuccess;
}
thread_local struct {
  dim3 grid, block;
  size_t shared;
  void* stream;
} configured;
}  // namespace

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 0; }
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                                   uint3*, dim3*, dim3*, int*) {
  Locked locked;
  state().kernels[function] = name;
}
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  return configured = {grid, block, shared, stream}, 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configured.grid;
  *block = configured.block;
  *shared = configured.shared;
  *(void**)stream = configured.stream;
  return cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return *kernel = (cudaKernel_t)function, cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(kernel, stream);
}
EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(function, stream);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t,
                                               cudaStream_t stream) {
  return launch(function, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  return launch(function, config->stream);
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  return function(data), cudaSuccess;
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = 90;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  return *blocks = 2, cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                          size_t, unsigned) {
  return *blocks = 2, cudaSuccess;
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  static auto succeed = +[]() -> int { return 0; };
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  void* found = driver ? dlsym(driver, name) : nullptr;
  *function = found ? found : (void*)succeed;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// -- cuBLAS: a line a product --------------------------------------------------------------------

namespace {
thread_local void* blas_stream;
int product(void* stream, int m, int n, int k) { return note_device(), write_line("gemm %p %dx%dx%d", stream, m, n, k), 0; }
}  // namespace

EXPORT int cublasCreate_v2(void** handle) { return *handle = calloc(1, 4096), 0; }
EXPORT int cublasDestroy_v2(void*) { return 0; }
EXPORT int cublasSetStream_v2(void*, void* stream) { return blas_stream = stream, 0; }
EXPORT int cublasGetMathMode(void*, int* mode) { return *mode = 0, 0; }
EXPORT int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0, 0; }
EXPORT int cublasGemmEx(void*, int, int, int m, int n, int k) { return product(blas_stream, m, n, k); }
EXPORT int cublasGemmStridedBatchedEx(void*, int, int, int m, int n, int k) {
  return product(blas_stream, m, n, k);
}
EXPORT int cublasSgemm_v2(void*, int, int, int m, int n, int k) { return product(blas_stream, m, n, k); }
EXPORT int cublasSgemmStridedBatched(void*, int, int, int m, int n, int k) {
  return product(blas_stream, m, n, k);
}
EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*,
                                          int* found) {
  return *found = 1, 0;
}
EXPORT int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*,
                          const void*, void*, void*, void*, const void*, void*, size_t, void* stream) {
  return product(stream, 0, 0, 0);
}

// -- cuDNN's graphs (attention): descriptors hold what they are given, any graph has one engine -----

struct cudnnContext {
  cudaStream_t stream;
};

namespace {
struct Descriptor {
  std::map<int, std::vector<char>> attributes;
};
size_t bytes_of(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_BOOLEAN: case CUDNN_TYPE_CHAR: return 1;
    case CUDNN_TYPE_HANDLE: case CUDNN_TYPE_INT64: case CUDNN_TYPE_DOUBLE: case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8;
    case CUDNN_TYPE_FRACTION: return 16;
    default: return 4;
  }
}
}  // namespace

EXPORT cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  return *handle = new cudnnContext{}, CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) { return delete handle, CUDNN_STATUS_SUCCESS; }
EXPORT cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  return handle->stream = stream, CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t,
                                                  cudnnBackendDescriptor_t* made) {
  return *made = new Descriptor, CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t each) {
  return delete (Descriptor*)each, CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }
EXPORT cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t each,
                                              cudnnBackendAttributeName_t name,
                                              cudnnBackendAttributeType_t type, int64_t count,
                                              const void* values) {
  const char* start = (const char*)values;
  ((Descriptor*)each)->attributes[name].assign(start, start + count * bytes_of(type));
  return CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t each,
                                              cudnnBackendAttributeName_t name,
                                              cudnnBackendAttributeType_t type, int64_t wanted,
                                              int64_t* count, void* values) {
  auto& known = ((Descriptor*)each)->attributes;
  auto found = known.find(name);
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {  // they are the caller's, and stay empty
    if (count) *count = name == CUDNN_ATTR_ENGINEHEUR_RESULTS || name == CUDNN_ATTR_ENGINECFG_ENGINE;
  } else if (found != known.end()) {
    int64_t there = found->second.size() / bytes_of(type);
    if (count) *count = there;
    if (values) memcpy(values, found->second.data(), std::min(wanted, there) * bytes_of(type));
  } else {
    bool is_list = name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE || name == CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE;
    if (count) *count = is_list ? 0 : 1;
    if (values && wanted && !is_list) memset(values, 0, bytes_of(type));  // no workspace, engine 0
  }
  return CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t,
                                         cudnnBackendDescriptor_t) {
  note_device();
  return write_line("kernel %p cudnn", handle->stream), CUDNN_STATUS_SUCCESS;
}

// -- NCCL: no peers, a line a collective ---------------------------------------------------------

struct ncclComm {
  int ranks, rank;
  unsigned long long name;  // the same on all its ranks
  int splits;
};

namespace {
size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 4;
  }
}
ncclResult_t collective(const char* name, cudaStream_t stream, const void* from, size_t from_bytes,
                        const void* to, size_t to_bytes, ncclComm_t comm) {
  Locked locked;
  if (state().capturing) state().captured.insert(comm);
  bool known = holds(state().registered, from) && holds(state().registered, to);
  write_line("collective %p %s %p %zu %p %zu %llx %d %s", stream, name, from, from_bytes, to, to_bytes,
             comm->name, comm->ranks, known ? "registered" : "plain");
  return ncclSuccess;
}
}  // namespace

EXPORT ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return getrandom(id, sizeof *id, 0) == sizeof *id ? ncclSuccess : ncclSystemError;
}
EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                           ncclConfig_t*) {
  *comm = new ncclComm{ranks, rank};
  memcpy(&(*comm)->name, &id, sizeof(*comm)->name);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
}
EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int, ncclUniqueId* id,
                                             ncclConfig_t*) {
  return ncclCommInitRankConfig(comm, ranks, *id, rank, nullptr);
}
// Ranks that split a communicator have to know each other's colours: they meet in files.
EXPORT ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* made, ncclConfig_t*) {
  const char* folder = getenv("STANDIN_MEETING");
  if (!folder) {
    fprintf(stderr, "stand-in: ncclCommSplit needs the parent's other ranks\n");
    return ncclInvalidUsage;
  }
  char stem[512];
  snprintf(stem, sizeof stem, "%s/%llx.%d.", folder, parent->name, parent->splits);
  auto path = [&](int rank) { return stem + std::to_string(rank); };
  FILE* own = fopen((path(parent->rank) + ".new").c_str(), "w");
  if (!own) return ncclSystemError;
  fprintf(own, "%d %d", color, key), fclose(own);
  rename((path(parent->rank) + ".new").c_str(), path(parent->rank).c_str());
  std::vector<std::pair<int, int>> members;  // key and rank, of the same colour
  for (int rank = 0, looks = 0; rank < parent->ranks; rank++) {
    FILE* file;
    while (!(file = fopen(path(rank).c_str(), "r")) && looks++ < 60000) usleep(1000);
    int their_color, their_key;
    if (!file || fscanf(file, "%d %d", &their_color, &their_key) != 2) return ncclSystemError;
    fclose(file);
    if (their_color == color) members.push_back({their_key, rank});
  }
  auto name = (parent->name + ++parent->splits) * 0x9e3779b97f4a7c15ull + (unsigned)color;
  if (color == NCCL_SPLIT_NOCOLOR) return *made = nullptr, ncclSuccess;
  std::sort(members.begin(), members.end());
  auto place = std::find(members.begin(), members.end(), std::pair{key, parent->rank});
  *made = new ncclComm{(int)members.size(), int(place - members.begin()), name};
  return ncclSuccess;
}
// NCCL waits until no CUDA graph is left that has captured the communicator (commDestroySync).
namespace {
ncclResult_t end(const char* call, ncclComm_t comm) {
  Locked locked;
  for (auto& [handle, graph] : state().graphs)
    if (graph.used.count(comm)) {
      fprintf(stderr, "stand-in: %s never returns, a CUDA graph holds its communicator\n", call);
      abort();
    }
  return ncclSuccess;
}
}  // namespace
EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm) { return end("ncclCommFinalize", comm); }
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) { return end("ncclCommDestroy", comm); }
EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) { return end("ncclCommAbort", comm); }
EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) { return *count = comm->ranks, ncclSuccess; }
EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return *rank = comm->rank, ncclSuccess; }
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  return *error = ncclSuccess, ncclSuccess;
}
EXPORT ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                                  ncclComm_t comm, cudaStream_t stream) {
  size_t bytes = count * bytes_of(type);
  return collective("all_gather", stream, from, bytes, to, bytes * comm->ranks, comm);
}
EXPORT ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                                      ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
  size_t bytes = count * bytes_of(type);
  return collective("reduce_scatter", stream, from, bytes * comm->ranks, to, bytes, comm);
}
EXPORT ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t,
                                  ncclComm_t comm, cudaStream_t stream) {
  size_t bytes = count * bytes_of(type);
  return collective("all_reduce", stream, from, bytes, to, bytes, comm);
}
EXPORT ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int,
                                  ncclComm_t comm, cudaStream_t stream) {
  size_t bytes = count * bytes_of(type);
  return collective("broadcast", stream, from, bytes, to, bytes, comm);
}
// An all-to-all is a message to each peer and one from each, in the order of their ranks.
namespace {
struct Message { const void* start; size_t bytes; };
thread_local Message sent, received;
void add(Message& whole, const void* part, size_t bytes, int peer) {
  if (peer == 0) whole = {part, 0};
  whole.bytes += bytes;
}
}  // namespace

EXPORT ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t,
                             cudaStream_t) {
  return add(sent, from, count * bytes_of(type), peer), ncclSuccess;
}
EXPORT ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
  add(received, to, count * bytes_of(type), peer);
  if (peer != comm->ranks - 1) return ncclSuccess;
  return collective("all_to_all", stream, sent.start, sent.bytes, received.start, received.bytes, comm);
}
EXPORT ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  cudaMalloc(pointer, bytes);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclMemFree(void* pointer) { return cudaFree(pointer), ncclSuccess; }
namespace {
template <typename Handle>
ncclResult_t do_register(void* start, size_t bytes, Handle* handle) {
  Locked locked;
  state().registered[(uintptr_t)start] = bytes;
  return *handle = (Handle)start, ncclSuccess;
}
ncclResult_t deregister(void* handle) {
  Locked locked;
  return state().registered.erase((uintptr_t)handle), ncclSuccess;
}
}  // namespace

EXPORT ncclResult_t ncclCommRegister(const ncclComm_t, void* start, size_t bytes, void** handle) {
  return do_register(start, bytes, handle);
}
EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t, void* handle) { return deregister(handle); }
EXPORT ncclResult_t ncclCommWindowRegister(ncclComm_t, void* start, size_t bytes, ncclWindow_t* window, int) {
  return do_register(start, bytes, window);
}
EXPORT ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t window) { return deregister(window); }
EXPORT const char* ncclGetErrorString(ncclResult_t) { return "an error of the stand-in"; }
EXPORT const char* ncclGetLastError(ncclComm_t) { return "none"; }

// A simulated accelerator: one device of PyTorch's PrivateUse1 type whose memory is host memory.
//
// Copies from and to pinned memory and collectives wait in the queues of their streams; every other
// operator waits on the host for its stream, then runs on the CPU. A stream has no thread: what it
// holds runs as late as it may, when the host or another stream waits for it ("late"), or when its
// simulated time has come. Fresh and freed memory holds NaN (all bits set). So a missing stream
// wait, or a tensor freed while another stream still uses it, gives wrong numbers: as on a GPU, only
// always.
//
// Time is simulated: copies, collectives and operators take what they are said to cost, streams run
// side by side, and the host goes on when what it waits for has ended. A log of it all can be read.
// Nothing hangs on the machine's clock, on its load or on the order of its threads.
//
// One lock guards the whole machine, which is never destroyed.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <mutex>
#include <set>

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace {

using at::Tensor;
using Lock = std::unique_lock<std::mutex>;
constexpr auto kSim = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kSim, 0);
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
constexpr int64_t kPool = 32; // as many streams as CUDA's pools have

// ---------------------------------------------------------------------------------------- streams

struct Mark { // a point in a stream's queue; what an event holds once it was recorded
  int64_t stream, number;
  double time; // simulated: when the stream gets there
  bool done = false;
  std::exception_ptr error;
};
using MarkPtr = std::shared_ptr<Mark>;

struct Task {
  double when; // simulated: when it has run
  std::function<void()> run;
};

struct Lane { // a stream
  int64_t priority = 0;
  double clock = 0; // simulated: when all that was queued has ended
  std::deque<Task> tasks;
  bool busy = false;
  std::exception_ptr error; // of a task; rethrown by the next wait of the host for this stream
};

struct Entry { // of the log, in the order in which the host did it
  std::string kind, name, group;
  int64_t stream, priority, bytes, point, block; // the numbers of a mark and of memory
  double start, end;
};

struct Block {
  size_t size;
  int64_t home; // the stream that was current at the allocation
  std::set<int64_t> users; // the other streams that it was recorded on
  bool of_group = false; // allocated through a process group
  int64_t number = 0;
};

struct Machine {
  std::mutex mutex;
  std::recursive_mutex running; // held by the thread that runs tasks
  std::deque<Lane> lanes{1 + 2 * kPool}; // default, pool, pool of high priority, process groups'
  std::array<int64_t, 2> next_of_pool{};
  int64_t pending = 0; // tasks queued or running, over all streams
  std::map<uintptr_t, Block> blocks;
  std::map<uintptr_t, size_t> pinned;
  std::vector<void*> quarantine; // freed and poisoned, but a queued task may still touch it
  int64_t live = 0, peak = 0;
  std::vector<std::tuple<std::string, bool, bool>> collectives;
  bool late = true, recording = false;
  double copy_cost = 0, comm_cost = 0, compute_cost = 0, now = 0; // now: where the host is
  int64_t marks = 0, numbered = 0;
  std::vector<Entry> log;

  Machine() {
    for (int64_t id = 1 + kPool; id < 1 + 2 * kPool; ++id)
      lanes[id].priority = -1;
  }
};

Machine& m = *new Machine;
thread_local int64_t current = 0;

// Under the lock.
void note(std::string kind, std::string name, int64_t stream, int64_t bytes = 0, int64_t point = -1,
          int64_t block = -1, double start = -1, double end = -1, std::string group = "") {
  if (!m.recording)
    return;
  if (start < 0)
    start = end = m.now;
  m.log.push_back({std::move(kind), std::move(name), std::move(group), stream,
                   stream < 0 ? 0 : m.lanes[stream].priority, bytes, point, block, start, end});
}

// The first task of a stream. Under the lock, which is let go of meanwhile.
void run_next(Lock& lock, Lane& lane) {
  auto task = std::move(lane.tasks.front().run);
  lane.tasks.pop_front();
  lane.busy = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    task();
  } catch (...) {
    error = std::current_exception();
  }
  task = nullptr; // what it held is freed while the stream still counts as busy
  lock.lock();
  lane.busy = false;
  if (error)
    lane.error = error;
  if (--m.pending == 0) {
    for (void* memory : m.quarantine)
      std::free(memory);
    m.quarantine.clear();
  }
}

// Without the GIL: a task may need it, to free a storage that Python knows.
template <class Call>
void without_gil(Call call) {
  std::optional<pybind11::gil_scoped_release> no_gil;
  if (Py_IsInitialized() && PyGILState_Check())
    no_gil.emplace();
  call();
}

void run_until(const MarkPtr& point) {
  without_gil([&] {
    std::lock_guard running(m.running);
    Lock lock(m.mutex);
    while (!point->done)
      run_next(lock, m.lanes[point->stream]);
  });
}

void run_all() {
  without_gil([] {
    std::lock_guard running(m.running);
    Lock lock(m.mutex);
    for (size_t id = 0; id < m.lanes.size(); ++id)
      while (!m.lanes[id].tasks.empty())
        run_next(lock, m.lanes[id]);
  });
}

// What ended before now, the first to end first; nothing, where all runs late. Not under the lock.
void run_due() {
  without_gil([] {
    std::lock_guard running(m.running);
    Lock lock(m.mutex);
    while (!m.late) {
      Lane* next = nullptr;
      for (Lane& lane : m.lanes)
        if (!lane.tasks.empty() && lane.tasks.front().when <= m.now &&
            (!next || lane.tasks.front().when < next->tasks.front().when))
          next = &lane;
      if (!next)
        break;
      run_next(lock, *next);
    }
  });
}

// These four are called under the lock.
bool idle(int64_t stream) {
  return m.lanes[stream].tasks.empty() && !m.lanes[stream].busy;
}

void enqueue(int64_t stream, std::function<void()> task) { // its time has been taken already
  Lane& lane = m.lanes[stream];
  lane.tasks.push_back({lane.clock, std::move(task)});
  ++m.pending;
}

MarkPtr mark(int64_t stream) {
  const double time = std::max(m.lanes[stream].clock, m.now);
  auto point = std::make_shared<Mark>(Mark{stream, ++m.marks, time});
  if (idle(stream))
    point->done = true;
  else
    enqueue(stream, [point] { Lock lock(m.mutex); point->done = true; });
  return point;
}

void await(int64_t stream, const MarkPtr& point) {
  m.lanes[stream].clock = std::max(m.lanes[stream].clock, point->time);
  if (point->done && !point->error)
    return;
  enqueue(stream, [point] {
    run_until(point);
    if (point->error)
      std::rethrow_exception(point->error);
  });
}

// What a stream does from when it is free, as far as time goes: start and end. Under the lock.
std::pair<double, double> take_time(int64_t stream, double cost) {
  double& clock = m.lanes[stream].clock;
  const double start = std::max(clock, m.now);
  return {start, clock = start + cost};
}

// Blocks the host.
void wait_on_host(const MarkPtr& point) {
  run_until(point);
  Lock lock(m.mutex);
  m.now = std::max(m.now, point->time);
  lock.unlock();
  run_due();
}

void drain(int64_t stream) {
  Lock lock(m.mutex);
  auto point = mark(stream);
  lock.unlock();
  wait_on_host(point);
  lock.lock();
  if (auto error = std::exchange(m.lanes[stream].error, nullptr))
    std::rethrow_exception(error);
}

// ----------------------------------------------------------------------------------------- memory

void* new_memory(size_t size) {
  void* memory = std::aligned_alloc(64, (size + 63) / 64 * 64);
  TORCH_CHECK(memory, "sim: out of memory");
  return std::memset(memory, 0xFF, size);
}

void poison(void* memory, size_t size) { // under the lock
  std::memset(memory, 0xFF, size);
  if (m.pending)
    m.quarantine.push_back(memory);
  else
    std::free(memory);
}

// Poisons a block once its own stream and those it was recorded on have run what they now hold.
// It counts as live as long as a recorded stream needs it, but not for its own stream's sake: that
// one could use the memory again at once.
void release(void* memory) {
  Lock lock(m.mutex);
  Block block = std::move(m.blocks.extract(reinterpret_cast<uintptr_t>(memory)).mapped());
  note("free", "", block.home, block.size, -1, block.number);
  std::set<int64_t> waits;
  std::copy_if(block.users.begin(), block.users.end(), std::inserter(waits, waits.end()),
               [](int64_t stream) { return !idle(stream); });
  const int64_t live_until_then = waits.empty() ? 0 : block.size;
  m.live -= block.size - live_until_then;
  if (!idle(block.home))
    waits.insert(block.home);
  if (waits.empty())
    return poison(memory, block.size);
  auto left = std::make_shared<size_t>(waits.size());
  for (int64_t stream : waits)
    enqueue(stream, [=, size = block.size] {
      Lock lock(m.mutex);
      if (--*left)
        return;
      m.live -= live_until_then;
      poison(memory, size);
    });
}

Block* block_of(const void* address) { // under the lock
  auto after = m.blocks.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (after == m.blocks.begin())
    return nullptr;
  auto& [start, block] = *std::prev(after);
  return reinterpret_cast<uintptr_t>(address) < start + block.size ? &block : nullptr;
}

void record_memory(const void* address, int64_t stream) {
  Lock lock(m.mutex);
  if (Block* block = block_of(address); block && block->home != stream)
    block->users.insert(stream);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    if (!size)
      return {nullptr, kDevice};
    void* memory = new_memory(size);
    Lock lock(m.mutex);
    const int64_t number = ++m.numbered;
    m.blocks.emplace(reinterpret_cast<uintptr_t>(memory), Block{size, current, {}, false, number});
    note("allocate", "", current, size, -1, number);
    m.peak = std::max(m.peak, m.live += size);
    return {memory, memory, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override {
    drain(current);
    default_copy_data(to, from, size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    record_memory(memory.get(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    Lock lock(m.mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& bytes = stats.allocated_bytes[0];
    bytes.current = m.live, bytes.peak = m.peak;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    Lock lock(m.mutex);
    m.peak = m.live;
  }
};
DeviceMemory& device_memory = *new DeviceMemory;
REGISTER_ALLOCATOR(kSim, &device_memory);

struct PinnedMemory final : c10::Allocator {
  static void release(void* memory) {
    Lock lock(m.mutex);
    auto size = m.pinned.extract(reinterpret_cast<uintptr_t>(memory)).mapped();
    std::free(std::memset(memory, 0xFF, size));
  }
  c10::DataPtr allocate(size_t size) override {
    void* memory = new_memory(std::max<size_t>(size, 1)); // that an empty tensor is pinned, too
    Lock lock(m.mutex);
    m.pinned.emplace(reinterpret_cast<uintptr_t>(memory), size);
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};

bool is_pinned(const void* address) {
  Lock lock(m.mutex);
  auto after = m.pinned.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (after == m.pinned.begin())
    return false;
  auto [start, size] = *std::prev(after);
  return reinterpret_cast<uintptr_t>(address) < start + std::max<size_t>(size, 1);
}

// -------------------------------------------------------------------------------- device and hooks

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int64_t streams() {
    Lock lock(m.mutex);
    return m.lanes.size();
  }
  static MarkPtr& of(void* event) { return *static_cast<MarkPtr*>(event); }
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "sim has one device, not ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool high_priority) const override {
    Lock lock(m.mutex);
    return stream(1 + high_priority * kPool + m.next_of_pool[high_priority]++ % kPool);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(current, next.id()));
  }
  bool queryStream(const c10::Stream& s) const override {
    Lock lock(m.mutex);
    return idle(s.id());
  }
  void synchronizeStream(const c10::Stream& s) const override {
    drain(s.id());
    Lock lock(m.mutex);
    note("synchronize", "stream", s.id());
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    for (int64_t id = 0; id < streams(); ++id)
      drain(id);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& s) const override {
    record_memory(memory.get(), s.id());
  }

  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event)
      *event = new MarkPtr;
    Lock lock(m.mutex);
    of(*event) = mark(s.id());
    note("record", "", s.id(), 0, of(*event)->number);
  }
  void block(void* event, const c10::Stream& s) const override {
    Lock lock(m.mutex);
    await(s.id(), of(event));
    note("wait", "", s.id(), 0, of(event)->number);
  }
  bool queryEvent(void* event) const override {
    Lock lock(m.mutex);
    return of(event)->done;
  }
  void synchronizeEvent(void* event) const override {
    wait_on_host(of(event));
    Lock lock(m.mutex);
    note("synchronize", "event", of(event)->stream, 0, of(event)->number);
  }
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    Lock lock(m.mutex);
    return 1e3 * (of(end)->time - of(start)->time);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* allocator = new PinnedMemory;
    return allocator;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto memory = device_memory.allocate(size);
    if (const size_t kept = std::min(size, storage.nbytes())) {
      drain(current);
      std::memcpy(memory.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};
const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// -------------------------------------------------------------------------------------- operators

// The same memory as a CPU tensor, which does not keep it alive.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone())
    return tensor;
  auto host = at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {},
      tensor.options().device(c10::kCPU), c10::Device(c10::kCPU));
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const Tensor& host = from.is_cpu() ? from : to;
  if (non_blocking && host.is_cpu() && from.dtype() == to.dtype() && from.sizes() == to.sizes() &&
      from.strides() == to.strides() && from.is_non_overlapping_and_dense() &&
      from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg() &&
      is_pinned(host.storage().data())) {
    // Only the host's side is held: who frees the device's side too early shall see it.
    Lock lock(m.mutex);
    const auto [start, end] = take_time(current, m.copy_cost);
    note("copy", from.is_cpu() ? "to device" : "to host", current, from.nbytes(), -1, -1, start,
         end);
    enqueue(current, [source = from.const_data_ptr(), target = to.data_ptr(), size = from.nbytes(),
                      held = host.storage()] { std::memcpy(target, source, size); });
    lock.unlock();
    run_due();
    return to;
  }
  drain(current);
  on_host(to).copy_(on_host(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes())
    to.resize_(from.sizes());
  return copy_from(from, to, false);
}

void foreach_copy(at::TensorList to, at::TensorList from, bool non_blocking) {
  for (size_t i = 0; i < to.size(); ++i)
    to[i].copy_(from[i], non_blocking);
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_memory, kKeys, c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_memory, kKeys,
                                           c10::dtype_or_default(dtype));
}

at::Scalar item(const Tensor& tensor) {
  drain(current);
  return on_host(tensor).item();
}

void record_stream(Tensor& tensor, c10::Stream stream) {
  record_memory(tensor.storage().data(), stream.id());
}

Tensor& set_storage(Tensor& tensor, at::Storage source) {
  const int64_t size = source.nbytes() / tensor.element_size();
  return at::native::set_storage_cpu_(tensor, std::move(source), 0, {size}, {});
}

// Lets `parameter.data = ...` change the device, and so `Module.to` keep the parameters' identity.
bool may_share_object(const Tensor& tensor, const Tensor& other) {
  return tensor.layout() == at::kStrided && other.layout() == at::kStrided &&
      tensor.key_set().has(c10::DispatchKey::Python) ==
      other.key_set().has(c10::DispatchKey::Python);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  drain(current);
  {
    Lock lock(m.mutex);
    const auto [start, end] = take_time(current, m.compute_cost);
    m.now = end;
    note("compute", op.schema().name(), current, 0, -1, -1, start, end);
  }
  run_due();
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("resize_", &at::native::resize_);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("_local_scalar_dense", &item);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_foreach_copy_", &foreach_copy);
  library.impl("record_stream", &record_stream);
  library.impl("_has_compatible_shallow_copy_type", &may_share_object);
  // Torch has formulas for these that any device could use; the CPU's kernels round otherwise.
  for (const char* name : {"native_layer_norm", "native_group_norm", "addr", "silu_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// The copy that resolves a lazy conjugate or negative must not have its argument resolved first.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) { // torch's macros want that name
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT32)
}

// ------------------------------------------------------------------------------------ collectives

template <class T>
std::vector<T> on_host(const std::vector<T>& items) {
  std::vector<T> host;
  for (const T& item : items)
    host.push_back(on_host(item));
  return host;
}

void hold(const Tensor& tensor, std::vector<c10::Storage>& held) {
  held.push_back(tensor.storage());
}

template <class T>
void hold(const std::vector<T>& items, std::vector<c10::Storage>& held) {
  for (const T& item : items)
    hold(item, held);
}

// Whether all of it lies in memory that a process group allocated. Under the lock.
bool of_group(const Tensor& tensor) {
  Block* block = block_of(tensor.data_ptr());
  return block && block->of_group;
}

template <class T>
bool of_group(const std::vector<T>& items) {
  return !items.empty() &&
      std::all_of(items.begin(), items.end(), [](const T& item) { return of_group(item); });
}

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct Work final : c10d::Work {
  Work(int rank, c10d::OpType type) : c10d::Work(rank, type) {}
  MarkPtr end = std::make_shared<Mark>(Mark{0, 0, 0});

  using c10d::Work::finish;
  void synchronize() override {
    Lock lock(m.mutex);
    await(current, end);
    note("wait", "collective", current, 0, end->number);
  }
  // Only a barrier stops the host, as in NCCL.
  bool wait(std::chrono::milliseconds) override {
    if (opType_ == c10d::OpType::BARRIER)
      wait_on_host(end);
    if (auto error = exception())
      std::rethrow_exception(error);
    synchronize();
    return true;
  }
};

// Runs each collective through gloo, on streams of its own: one for what all ranks take part in,
// one for sends and one for receives, so that two ranks may each send before they receive.
struct Simccl final : c10d::Backend {
  using Tensors = std::vector<Tensor>;
  using Lists = std::vector<Tensors>;
  enum { kAll, kSends, kReceives };

  c10::intrusive_ptr<c10d::Backend> gloo;
  std::string name;
  int64_t first_stream;

  Simccl(c10::intrusive_ptr<c10d::Backend> inner, std::string name, int64_t priority)
      : c10d::Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)), name(name) {
    Lock lock(m.mutex);
    first_stream = m.lanes.size();
    m.lanes.resize(first_stream + 3);
    for (int64_t stream : {kAll, kSends, kReceives})
      m.lanes[first_stream + stream].priority = priority;
  }

  // `call` starts gloo's collective on aliases of `to` and `from`. Their memory is held until the
  // end, and not by the aliases: gloo lets go of those some time after.
  template <class To, class From, class Options, class Call>
  WorkPtr queue(const char* name, c10d::OpType type, const To& to, const From& from,
                Options options, Call call, int stream = kAll) {
    auto work = c10::make_intrusive<Work>(rank_, type);
    auto host = std::make_shared<std::pair<To, From>>(on_host(to), on_host(from));
    std::vector<c10::Storage> held;
    hold(to, held);
    hold(from, held);
    int64_t bytes = 0, made = -1;
    for (const c10::Storage& storage : held)
      bytes = std::max<int64_t>(bytes, storage.nbytes());
    Lock lock(m.mutex);
    if (!held.empty())
      if (Block* block = block_of(held[0].data()))
        made = block->number;
    m.collectives.emplace_back(name, of_group(from), of_group(to));
    await(first_stream + stream, mark(current));
    const auto [start, end] = take_time(first_stream + stream, m.comm_cost);
    *work->end = {first_stream + stream, ++m.marks, end};
    note("collective", name, first_stream + stream, bytes, work->end->number, made, start, end,
         this->name);
    enqueue(first_stream + stream,
            [=, gloo = gloo, held = std::move(held)]() mutable {
      std::exception_ptr error;
      try {
        call(*gloo, host->first, host->second, options)->wait();
      } catch (...) {
        error = std::current_exception();
      }
      held.clear();
      work->finish(error);
      Lock lock(m.mutex);
      work->end->done = true;
      work->end->error = error;
    });
    lock.unlock();
    run_due();
    return work;
  }

#define COLLECTIVE(NAME, TYPE, TO, FROM, OPTIONS)                                                 \
  WorkPtr NAME(TO& to, FROM& from, const c10d::OPTIONS& options) override {                       \
    return queue(#NAME, c10d::OpType::TYPE, to, from, options,                                    \
                 [](auto& gloo, TO& to, FROM& from, auto& options) {                              \
                   return gloo.NAME(to, from, options);                                           \
                 });                                                                              \
  }
  COLLECTIVE(_allgather_base, _ALLGATHER_BASE, Tensor, Tensor, AllgatherOptions)
  COLLECTIVE(allgather, ALLGATHER, Lists, Tensors, AllgatherOptions)
  COLLECTIVE(allgather_into_tensor_coalesced, COALESCED, Tensors, Tensors, AllgatherOptions)
  COLLECTIVE(_reduce_scatter_base, _REDUCE_SCATTER_BASE, Tensor, Tensor, ReduceScatterOptions)
  COLLECTIVE(reduce_scatter, REDUCE_SCATTER, Tensors, Lists, ReduceScatterOptions)
  COLLECTIVE(reduce_scatter_tensor_coalesced, COALESCED, Tensors, Tensors, ReduceScatterOptions)
  COLLECTIVE(gather, GATHER, Lists, Tensors, GatherOptions)
  COLLECTIVE(scatter, SCATTER, Tensors, Lists, ScatterOptions)
  COLLECTIVE(alltoall, ALLTOALL, Tensors, Tensors, AllToAllOptions)

#define IN_PLACE(NAME, TYPE, OPTIONS)                                                             \
  WorkPtr NAME(Tensors& tensors, const c10d::OPTIONS& options) override {                         \
    return queue(#NAME, c10d::OpType::TYPE, tensors, tensors, options,                            \
                 [](auto& gloo, Tensors& to, Tensors&, auto& options) {                           \
                   return gloo.NAME(to, options);                                                 \
                 });                                                                              \
  }
  IN_PLACE(broadcast, BROADCAST, BroadcastOptions)
  IN_PLACE(allreduce, ALLREDUCE, AllreduceOptions)
  IN_PLACE(allreduce_coalesced, ALLREDUCE_COALESCED, AllreduceCoalescedOptions)
  IN_PLACE(reduce, REDUCE, ReduceOptions)

  WorkPtr alltoall_base(Tensor& to, Tensor& from, std::vector<int64_t>& to_sizes,
                        std::vector<int64_t>& from_sizes,
                        const c10d::AllToAllOptions& options) override {
    return queue("alltoall_base", c10d::OpType::ALLTOALL_BASE, to, from, options,
                 [=](auto& gloo, Tensor& to, Tensor& from, auto& options) mutable {
                   return gloo.alltoall_base(to, from, to_sizes, from_sizes, options);
                 });
  }
  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    auto call = [=](auto& gloo, auto&, Tensors& from, int) { return gloo.send(from, peer, tag); };
    return queue("send", c10d::OpType::SEND, Tensors{}, tensors, 0, call, kSends);
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    auto call = [=](auto& gloo, Tensors& to, auto&, int) { return gloo.recv(to, peer, tag); };
    return queue("recv", c10d::OpType::RECV, tensors, Tensors{}, 0, call, kReceives);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto call = [](auto& gloo, auto&, auto&, auto& options) { return gloo.barrier(options); };
    return queue("barrier", c10d::OpType::BARRIER, Tensors{}, Tensors{}, options, call);
  }

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  Tensor allocateTensor(long size, at::TensorOptions options) override {
    auto tensor = at::empty({size}, options.device(kDevice));
    Lock lock(m.mutex);
    if (Block* block = block_of(tensor.data_ptr()))
      block->of_group = true;
    return tensor;
  }

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void abort() override { gloo->abort(); }
  void shutdown() override {
    for (int64_t stream : {kAll, kSends, kReceives}) {
      Lock lock(m.mutex);
      auto end = mark(first_stream + stream);
      lock.unlock();
      wait_on_host(end);
    }
  }
};

template <class T>
auto reader(T Machine::*field) {
  return [field] {
    Lock lock(m.mutex);
    return m.*field;
  };
}

} // namespace

PYBIND11_MODULE(sim_accelerator, module) {
  module.def("configure", [](double copy, double comm, double compute, bool late) {
    run_all(); // what was queued under the old settings
    Lock lock(m.mutex);
    m.copy_cost = copy, m.comm_cost = comm, m.compute_cost = compute, m.late = late;
  });
  module.def("now", reader(&Machine::now));
  module.def("record", [](bool enable) {
    Lock lock(m.mutex);
    m.recording = enable;
  });
  module.def("take_log", [] {
    Lock lock(m.mutex);
    using Row = std::tuple<std::string, std::string, std::string, int64_t, int64_t, int64_t,
                           int64_t, int64_t, double, double>;
    std::vector<Row> rows;
    for (const Entry& e : std::exchange(m.log, {}))
      rows.emplace_back(e.kind, e.name, e.group, e.stream, e.priority, e.bytes, e.point,
                        e.block, e.start, e.end);
    return rows;
  });
  module.def("note", [](std::string text) {
    Lock lock(m.mutex);
    note("note", text, -1);
  });
  module.def("live_bytes", reader(&Machine::live));
  module.def("peak_bytes", reader(&Machine::peak));
  module.def("collectives", reader(&Machine::collectives));
  module.def("pending_tasks", reader(&Machine::pending));
  module.def("reset_peak", [] { device_memory.resetPeakStats(0); });
  module.def("reset_counters", [] {
    Lock lock(m.mutex);
    m.collectives.clear();
  });
  module.def("wrap", [](c10::intrusive_ptr<c10d::Backend> gloo, std::string name, int64_t priority) {
    return c10::intrusive_ptr<c10d::Backend>(
        c10::make_intrusive<Simccl>(std::move(gloo), std::move(name), priority));
  });
}

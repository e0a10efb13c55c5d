// An accelerator for machines that have none: torch's device "pretend", with memory, streams and events of its own.
//
// Its memory is at addresses that the host cannot read, so what touches it without a copy ends in a segmentation fault.
// Operations are those of the CPU. Copies on other streams than the default one, and those to the host that it has to wait
// for, are done as late as is allowed, when something waits for them, and hold no memory: what is freed, read or written too
// early is seen in the numbers. Memory that is freed is filled with bytes that make NaNs. All else is done at once, so a copy
// that may come before it shows in no numbers: it raises. Each stream and the host know how much they have waited for, and
// memory knows what has used it last.

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

using namespace at;

namespace {

constexpr auto kPretend = DeviceType::PrivateUse1;
const Device kDevice(kPretend, 0);
constexpr size_t kRoom = 1ull << 37;  // of addresses; pages are taken when they are touched

std::recursive_mutex lock;
char *seen = nullptr, *real = nullptr;  // what pointers say, and where the bytes are
size_t end_of_used = 0;
std::map<size_t, std::vector<size_t>> unused;  // by size
std::map<size_t, size_t> used;                 // bytes that were asked for, by place
struct Uses {
  int64_t last = 0, last_write = 0;
};
std::map<size_t, Uses> uses;                 // by place: numbers of operations, also of those of who had the memory before
int64_t operations = 0, known_to_host = 0;  // how many the default stream has done, and how many the host has waited for
int64_t in_use = 0, most_in_use = 0;           // bytes that were asked for
int64_t most_allowed = kRoom;                  // of them in use
int64_t to_device = 0, from_device = 0;        // bytes copied
std::atomic<int64_t> waits = 0;                // operations for which the host has to wait until the device has done all
int64_t stalls = 0, copies = 0, events = 0;    // waits of what computes for other streams; copies on these; ends of such
thread_local int in_fallback = 0;
thread_local StreamId current = 0;

char* bytes_at(const void* pointer) { return real + (static_cast<const char*>(pointer) - seen); }

char* reserved(int protection) {
  void* found = mmap(nullptr, kRoom, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(found != MAP_FAILED, "no room for the memory of a device");
  return static_cast<char*>(found);
}

size_t rounded(size_t nbytes) { return (nbytes + 511) / 512 * 512; }

void release(void* pointer) {
  if (pointer == nullptr) return;
  std::lock_guard<std::recursive_mutex> guard(lock);
  const size_t place = static_cast<char*>(pointer) - seen, size = rounded(used[place]);
  in_use -= used[place];
  used.erase(place);
  memset(real + place, 0xff, size);
  unused[size].push_back(place);
}

struct Memory final : Allocator {
  DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &release, kDevice};
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (seen == nullptr) seen = reserved(PROT_NONE), real = reserved(PROT_READ | PROT_WRITE);
    const size_t size = rounded(nbytes);
    TORCH_CHECK_WITH(OutOfMemoryError, in_use + static_cast<int64_t>(nbytes) <= most_allowed, "pretend out of memory");
    auto& fitting = unused[size];
    size_t place = end_of_used;
    if (fitting.empty()) {
      end_of_used += size;
      memset(real + place, 0xff, size);
    } else {
      place = fitting.back();
      fitting.pop_back();
    }
    if (current != 0) uses.erase(place);  // real allocators have memory for each stream
    used[place] = nbytes;
    in_use += nbytes;
    most_in_use = std::max(most_in_use, in_use);
    return {seen + place, seen + place, &release, kDevice};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(bytes_at(to), bytes_at(from), nbytes); }
};

Memory memory;
REGISTER_ALLOCATOR(kPretend, &memory)

// -- streams -----------------------------------------------------------------------------------------------------------

struct Queue {
  std::deque<std::function<void()>> waiting;
  int64_t done = 0, known = 0;  // operations of the default stream that come before what is issued next
};
std::map<StreamId, Queue> queues;

struct Recorded {
  StreamId stream;
  int64_t count, known;
  std::chrono::steady_clock::time_point at = std::chrono::steady_clock::now();  // of the stream that computes: it runs at once
};

void run_until(StreamId stream, int64_t count) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  auto& queue = queues[stream];
  while (queue.done < count) {
    auto work = queue.waiting.front();
    queue.waiting.pop_front();
    queue.done++;
    work();
  }
}

int64_t issued(StreamId stream) { return queues[stream].done + static_cast<int64_t>(queues[stream].waiting.size()); }

void issue(std::function<void()> work) {
  if (current == 0) return work();
  std::lock_guard<std::recursive_mutex> guard(lock);
  queues[current].waiting.push_back(std::move(work));
}

std::deque<std::pair<int64_t, std::function<void()>>> for_host;  // copies by the default stream that the host has to wait for

// The host has waited for so many operations of the default stream.
void host_waited(int64_t count) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  known_to_host = std::max(known_to_host, count);
  for (; !for_host.empty() && for_host.front().first <= known_to_host; for_host.pop_front()) for_host.front().second();
}

int64_t known_to(StreamId stream) { return stream == 0 ? operations : std::max(queues[stream].known, known_to_host); }

// Notes that the default stream uses the memory of a tensor, or requires that another stream has waited for who used it.
void use(const Tensor& tensor, bool is_written) {
  if (tensor.device().type() != kPretend || tensor.storage().nbytes() == 0) return;
  std::lock_guard<std::recursive_mutex> guard(lock);
  const size_t at = static_cast<const char*>(tensor.storage().data()) - seen;
  auto& found = uses[std::prev(used.upper_bound(at))->first];
  if (current != 0) {
    const auto before = is_written ? found.last : found.last_write;
    TORCH_CHECK(before <= known_to(current), "a stream does not wait for what was computed with the memory that it copies");
    return;
  }
  found.last = ++operations;
  if (is_written) found.last_write = operations;
}

Stream stream_of(StreamId id) { return Stream(Stream::UNSAFE, kDevice, id); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = kPretend;
  DeviceType type() const override { return kPretend; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const override { return stream_of(current); }
  Stream getDefaultStream(Device) const override { return stream_of(0); }
  Stream getNewStream(Device, int) const override {
    static StreamId last = 0;
    return stream_of(++last);
  }
  Stream exchangeStream(Stream stream) const override {
    const StreamId before = current;
    current = stream.id();
    return stream_of(before);
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const EventFlag) const override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    delete static_cast<Recorded*>(*event);
    *event = new Recorded{stream.id(), issued(stream.id()), known_to(stream.id())};
    events += stream.id() != 0;
  }
  void block(void* event, const Stream& stream) const override {
    const auto recorded = *static_cast<Recorded*>(event);
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (stream.id() == 0) {
      stalls += queues[recorded.stream].done < recorded.count;
      return run_until(recorded.stream, recorded.count);
    }
    auto& queue = queues[stream.id()];
    queue.known = std::max(queue.known, recorded.known);
    queue.waiting.push_back([recorded] { run_until(recorded.stream, recorded.count); });
  }
  bool queryEvent(void* event) const override {
    const auto* recorded = static_cast<Recorded*>(event);
    if (recorded == nullptr) return true;
    const bool is_done = queues[recorded->stream].done >= recorded->count;
    if (is_done) host_waited(recorded->known);
    return is_done;
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    const auto* begin = static_cast<Recorded*>(first);
    return std::chrono::duration<double, std::milli>(static_cast<Recorded*>(second)->at - begin->at).count();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Recorded*>(event); }
  bool queryStream(const Stream& stream) const override { return queues[stream.id()].waiting.empty(); }
  void synchronizeStream(const Stream& stream) const override {
    host_waited(known_to(stream.id()));
    run_until(stream.id(), issued(stream.id()));
  }
  void synchronizeEvent(void* event) const override {
    const auto* recorded = static_cast<Recorded*>(event);
    host_waited(recorded->known);
    run_until(recorded->stream, recorded->count);
  }
  void synchronizeDevice(const DeviceIndex) const override {
    host_waited(operations);
    for (auto& each : queues) run_until(each.first, issued(each.first));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : PrivateUse1HooksInterface {
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  Device getDeviceFromPtr(void*) const override { return kDevice; }
  void resizePrivateUse1Bytes(const Storage& storage, size_t nbytes) const override {
    auto grown = memory.allocate(nbytes);
    const size_t kept = std::min<size_t>(nbytes, storage.nbytes());
    if (kept) memcpy(bytes_at(grown.get()), bytes_at(storage.data()), kept);
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(nbytes);
  }
};

// -- operations --------------------------------------------------------------------------------------------------------

// The same bytes as a tensor of the CPU, which keeps them if it is to.
Tensor on_cpu(const Tensor& tensor, bool keeps = false) {
  if (tensor.device().type() != kPretend) return tensor;
  const size_t nbytes = tensor.storage().nbytes();
  void* address = nbytes ? bytes_at(tensor.storage().data()) : nullptr;
  DataPtr bytes(address, Device(kCPU));
  if (keeps) bytes = {address, new Tensor(tensor), [](void* held) { delete static_cast<Tensor*>(held); }, Device(kCPU)};
  Storage storage(Storage::use_byte_size_t(), nbytes, std::move(bytes), nullptr, false);
  auto found = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  found._set_conj(tensor.is_conj());
  found._set_neg(tensor.is_neg());
  return found;
}

// Memory of the host as the stream will read it: at the same address, whoever holds it then.
Tensor unheld(const Tensor& tensor) {
  if (tensor.device().type() == kPretend) return on_cpu(tensor);
  DataPtr bytes(tensor.storage().mutable_data(), Device(kCPU));
  Storage storage(Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(bytes), nullptr, false);
  auto found = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return found;
}

void count(const Tensor& from, const Tensor& to) {
  if (in_fallback || from.device().type() == to.device().type()) return;
  (to.device().type() == kPretend ? to_device : from_device) += from.numel() * from.element_size();
}

// The host waits until the default stream has done all.
void wait() {
  waits++;
  host_waited(operations);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  count(from, to);
  use(from, false);
  use(to, true);
  if (non_blocking && current != 0) {
    copies++;
    issue([source = unheld(from), target = unheld(to)] { target.copy_(source); });
  } else if (non_blocking && to.device().type() != kPretend) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    for_host.emplace_back(operations, [source = on_cpu(from).clone(), target = unheld(to)] { target.copy_(source); });
  } else {
    if (!in_fallback && !non_blocking && from.device().type() != to.device().type()) wait();
    run_until(current, issued(current));
    on_cpu(to).copy_(on_cpu(from));
  }
  return to;
}

const Tensor& resized(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat>) {
  const size_t needed = (c10::multiply_integers(size) + self.storage_offset()) * self.element_size();
  if (needed > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) resized(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

Tensor& set_to(Tensor& self, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
Tensor& set_to_storage(Tensor& self, Storage storage) {
  const int64_t numel = storage.nbytes() / self.element_size();
  return set_to(self, std::move(storage), 0, IntArrayRef{numel}, IntArrayRef{1});
}
Tensor& set_to_tensor(Tensor& self, const Tensor& other) {
  return set_to(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

ScalarType or_default(std::optional<ScalarType> dtype) { return dtype.value_or(c10::get_default_dtype_as_scalartype()); }

Tensor made(
    IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device>, std::optional<bool>,
    std::optional<MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, DispatchKeySet(DispatchKey::PrivateUse1), or_default(dtype), format);
}
Tensor made_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device>,
    std::optional<bool>) {
  const DispatchKeySet keys(DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, or_default(dtype));
}
Tensor viewed(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }
Scalar item(const Tensor& self) {
  wait();
  return on_cpu(self).item();
}

void by_cpu(const OperatorHandle& operation, torch::jit::Stack* stack) {
  struct Inside {
    Inside() { in_fallback++; }
    ~Inside() { in_fallback--; }
  } inside;
  const auto& name = operation.operator_name().name;
  if (name == "aten::equal" || name == "aten::nonzero" || name == "aten::is_nonzero") wait();
  at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", made);
  m.impl("empty_strided", made_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", viewed);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resized);
  m.impl("set_.source_Storage", set_to_storage);
  m.impl("set_.source_Storage_storage_offset", set_to);
  m.impl("set_.source_Tensor", set_to_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
}

// -- collectives -------------------------------------------------------------------------------------------------------

using c10d::Work;
using Group = c10::intrusive_ptr<c10d::Backend>;

std::vector<Tensor> all_on_cpu(const std::vector<Tensor>& tensors) {
  run_until(current, issued(current));
  std::vector<Tensor> found;
  for (const auto& tensor : tensors) {
    use(tensor, true);
    found.push_back(on_cpu(tensor, true));
  }
  return found;
}

// Gloo, on the memory of the device, which is kept meanwhile. It reads what the current stream has written, as NCCL does, and
// not what others have.
struct Collectives final : c10d::Backend {
  explicit Collectives(Group inner) : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}
  const std::string getBackendName() const override { return "pretend"; }
  c10::intrusive_ptr<Work> broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    auto there = all_on_cpu(tensors);
    return inner_->broadcast(there, options);
  }
  c10::intrusive_ptr<Work> allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    auto there = all_on_cpu(tensors);
    return inner_->allreduce(there, options);
  }
  c10::intrusive_ptr<Work> allgather(
      std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<std::vector<Tensor>> there;
    for (const auto& each : outputs) there.push_back(all_on_cpu(each));
    auto inputs_there = all_on_cpu(inputs);
    return inner_->allgather(there, inputs_there, options);
  }
  c10::intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto output_there = all_on_cpu({output})[0], input_there = all_on_cpu({input})[0];
    return inner_->_allgather_base(output_there, input_there, options);
  }
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(
      std::vector<Tensor>& outputs, std::vector<Tensor>& inputs, const c10d::AllgatherOptions& options) override {
    auto outputs_there = all_on_cpu(outputs), inputs_there = all_on_cpu(inputs);
    return inner_->allgather_into_tensor_coalesced(outputs_there, inputs_there, options);
  }
  c10::intrusive_ptr<Work> alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto output_there = all_on_cpu({output})[0], input_there = all_on_cpu({input})[0];
    return inner_->alltoall_base(output_there, input_there, output_sizes, input_sizes, options);
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto output_there = all_on_cpu({output})[0], input_there = all_on_cpu({input})[0];
    return inner_->_reduce_scatter_base(output_there, input_there, options);
  }
  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      std::vector<Tensor>& outputs, std::vector<Tensor>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto outputs_there = all_on_cpu(outputs), inputs_there = all_on_cpu(inputs);
    return inner_->reduce_scatter_tensor_coalesced(outputs_there, inputs_there, options);
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override { return inner_->barrier(options); }

 private:
  Group inner_;
};

// In place of collectives on the host, which a process group over NCCL alone has not: each raises.
struct None final : c10d::Backend {
  using Backend::Backend;
  const std::string getBackendName() const override { return "none"; }
};

}  // namespace

// Collectives of the device for a process group that has those of gloo; the group has no others then.
extern "C" void pretend_join(const char* group_name) {
  auto group = c10d::resolve_process_group(group_name);
  auto collectives = c10::make_intrusive<Collectives>(group->getBackend(kCPU));
  collectives->setGroupUid(group_name);
  group->setBackend(kPretend, c10d::ProcessGroup::BackendType::CUSTOM, c10::static_intrusive_pointer_cast<c10d::Backend>(collectives));
  auto none = c10::make_intrusive<None>(collectives->getRank(), collectives->getSize());
  group->setBackend(kCPU, c10d::ProcessGroup::BackendType::UNDEFINED, c10::static_intrusive_pointer_cast<c10d::Backend>(none));
}

extern "C" void pretend_begin() {
  static Hooks hooks;
  RegisterPrivateUse1HooksInterface(&hooks);
}

// Copies that nothing has waited for yet.
extern "C" int pretend_waiting() {
  std::lock_guard<std::recursive_mutex> guard(lock);
  size_t found = 0;
  for (auto& each : queues) found += each.second.waiting.size();
  return static_cast<int>(found);
}

// Bytes copied to the device and from it since the last call.
extern "C" void pretend_moved(int64_t* found) {
  found[0] = to_device, found[1] = from_device;
  to_device = from_device = 0;
}

// Operations that made the host wait for the device since the last call.
extern "C" int pretend_waits() { return static_cast<int>(waits.exchange(0)); }

// Since the last call: how often what computes had to wait for another stream, copies on such streams, and events recorded there.
extern "C" void pretend_streams(int64_t* found) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  found[0] = stalls, found[1] = copies, found[2] = events;
  stalls = copies = events = 0;
}

// Bytes of memory that may be in use.
extern "C" void pretend_limit(int64_t nbytes) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  most_allowed = nbytes;
}

// Bytes of memory in use, and the most since the last call.
extern "C" void pretend_used(int64_t* found) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  found[0] = in_use, found[1] = most_in_use;
  most_in_use = in_use;
}

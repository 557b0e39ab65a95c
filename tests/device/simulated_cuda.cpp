// A second device that is real to PyTorch and runs on the CPU.
//
// Its memory is the CPU's, but no CPU operator takes its tensors: each call arrives in `run_boxed`, which
// raises as CUDA would where devices are mixed, counts what would be a kernel launch, a copy between host
// and device or a synchronisation, and then runs the CPU kernel on aliases of the tensors (same memory, so
// views, strides, in-place and out= work without copies). It takes the place of CUDA in a build of torch
// without it, so that `is_cuda` and `device.type == "cuda"` are true.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>


namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
constexpr auto SIM = c10::DeviceType::CUDA;
constexpr auto KEY = DispatchKey::CUDA;
const DeviceIndex DEVICES = std::getenv("SIM_DEVICES") ? std::atoi(std::getenv("SIM_DEVICES")) : 1;  // at most 4

// ---------------------------------------------------------------- counters

std::mutex counter_mutex;
std::map<std::string, int64_t> counters;
std::atomic<bool> counting{true};
py::object* listener = nullptr;  // called with (kind, operator) at what stalls a GPU

std::atomic<int64_t> launched{0};  // operators so far; what was launched BEHIND of them ago is done
std::atomic<int64_t> done{0};
constexpr int64_t BEHIND = 16;

void count(const char* kind, const std::string& what, bool stalls) {
  ++launched;
  if (stalls) done = launched.load();
  if (!counting) return;
  {
    std::lock_guard<std::mutex> lock(counter_mutex);
    counters[std::string(kind) + " " + what] += 1;
  }
  if (stalls && listener != nullptr && Py_IsInitialized()) {
    py::gil_scoped_acquire gil;
    if (listener != nullptr && !listener->is_none()) (*listener)(kind, what);
  }
}

// ---------------------------------------------------------------- device, memory, streams

thread_local DeviceIndex current = 0;
thread_local c10::StreamId current_stream[4] = {0, 0, 0, 0};

struct Memory {
  std::atomic<int64_t> now{0}, peak{0}, allocations{0};
} memory[4];

struct Block {
  void* data = nullptr;
  int64_t bytes = 0;
  DeviceIndex device = 0;
  std::optional<c10::Storage> adopted;  // a CPU storage that a kernel made
};

void take(DeviceIndex device, int64_t bytes) {
  auto& m = memory[device];
  int64_t now = (m.now += bytes);
  m.allocations += 1;
  for (int64_t peak = m.peak; now > peak && !m.peak.compare_exchange_weak(peak, now);) {
  }
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  memory[block->device].now -= block->bytes;
  if (!block->adopted) std::free(block->data);
  delete block;
}

void nothing(void*) {}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return on(current, bytes); }
  static c10::DataPtr on(DeviceIndex device, size_t bytes) {
    auto* block = new Block{nullptr, static_cast<int64_t>(bytes), device, {}};
    if (bytes) {
      block->data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
      TORCH_CHECK(block->data, "cuda" " out of memory");
      std::memset(block->data, 0xff, bytes);  // uninitialised floats are NaN
    }
    take(device, block->bytes);
    return {block->data, block, &free_block, Device(SIM, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = memory[d].now;
    stats.allocated_bytes[0].peak = memory[d].peak;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex d) override { memory[d].peak = memory[d].now.load(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override { return {1ull << 33, 1ull << 34}; }
};

Allocator allocator;
REGISTER_ALLOCATOR(SIM, &allocator);

struct PinnedAllocator final : c10::Allocator {
  static inline std::mutex mutex;
  static inline std::unordered_set<const void*> pinned;
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    std::lock_guard<std::mutex> lock(mutex);
    pinned.insert(data);
    return {data, data, &release, c10::kCPU};
  }
  static void release(void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    pinned.erase(data);
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinned_allocator;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SIM; }
  Device getDevice() const override { return {SIM, current}; }
  Device exchangeDevice(Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < DEVICES, "cuda" ": invalid device ordinal ", int(d.index()));
    if (d.index() >= 0) current = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current = d.index();
  }
  static DeviceIndex of(Device d) { return d.index() < 0 ? current : d.index(); }
  c10::Stream getStream(Device d) const override {
    return c10::Stream(c10::Stream::UNSAFE, Device(SIM, of(d)), current_stream[of(d)]);
  }
  c10::Stream getDefaultStream(Device d) const override { return c10::Stream(c10::Stream::DEFAULT, Device(SIM, of(d))); }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(Device d, int) const override {
    static std::atomic<c10::StreamId> next{1};
    return c10::Stream(c10::Stream::UNSAFE, Device(SIM, of(d)), next++);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    current_stream[of(s.device())] = s.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(launched.load());
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    const auto at = reinterpret_cast<int64_t>(event);
    return at <= done || at + BEHIND <= launched;
  }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { count("sync", "synchronize", true); }
  void synchronizeEvent(void*) const override { count("sync", "synchronize", true); }
  void synchronizeDevice(const DeviceIndex) const override { count("sync", "synchronize", true); }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---------------------------------------------------------------- random numbers

uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// As CUDA's: the state is a seed and an offset, in 16 bytes, and each kernel moves the offset. With
// $SIM_RANDOM=cpu the numbers and the states are those of the CPU instead, for tests that expect them.
const bool LIKE_CPU = std::getenv("SIM_RANDOM") && std::string(std::getenv("SIM_RANDOM")) == "cpu";

struct SimGenerator final : c10::GeneratorImpl {
  explicit SimGenerator(DeviceIndex d, at::Generator own = at::detail::createCPUGenerator())
      : GeneratorImpl(Device(SIM, d), DispatchKeySet(KEY)), own_(std::move(own)) {}
  at::Generator own_;
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0, own_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return LIKE_CPU ? own_.current_seed() : seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return current_seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    if (LIKE_CPU) return own_.unsafeGetGeneratorImpl()->set_state(state);
    TORCH_CHECK(state.device().is_cpu() && state.dtype() == at::kByte, "RNG state must be a torch.ByteTensor");
    TORCH_CHECK(state.numel() == 16 || state.numel() == 8, "RNG state is wrong size");
    const auto* data = static_cast<const uint64_t*>(state.data());
    seed_ = data[0];
    offset_ = state.numel() == 16 ? data[1] : 0;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    if (LIKE_CPU) return own_.unsafeGetGeneratorImpl()->get_state();
    auto state = at::detail::empty_cpu({16}, at::kByte);
    auto* data = static_cast<uint64_t*>(state.mutable_data_ptr());
    data[0] = seed_, data[1] = offset_;
    return state.getIntrusivePtr();
  }
  SimGenerator* clone_impl() const override {
    auto* copy = new SimGenerator(device_.index(), own_.clone());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  at::Generator next() {  // of one kernel
    if (LIKE_CPU) return own_;
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = at::detail::createCPUGenerator(mix(seed_ ^ mix(offset_)));
    offset_ += 4;
    return found;
  }
};

const at::Generator& default_generator(DeviceIndex d) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex i = 0; i < DEVICES; i++)
      made.push_back(LIKE_CPU ? at::make_generator<SimGenerator>(i, at::detail::getDefaultCPUGenerator())
                              : at::make_generator<SimGenerator>(i));
    return made;
  }();
  return all.at(d < 0 ? current : d);
}

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  DeviceIndex current_device() const override { return current; }
  int getNumGPUs() const override { return DEVICES; }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  void deviceSynchronize(DeviceIndex) const override { count("sync", "synchronize", true); }
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(DeviceIndex d) const override { current = d; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(current, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return std::exchange(current, d); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override {
    return at::make_generator<SimGenerator>(d < 0 ? current : d);
  }
  Device getDeviceFromPtr(void*) const override { return {SIM, current}; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(PinnedAllocator::mutex);
    return PinnedAllocator::pinned.count(data) > 0;
  }
};
using at::CUDAHooksArgs;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

// ---------------------------------------------------------------- aliases on the CPU

bool on_sim(const Tensor& t) { return t.defined() && t.device().type() == SIM; }

DispatchKeySet bits(const Tensor& t) {
  return t.key_set() & DispatchKeySet({DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor});
}

Tensor like(const Tensor& t, c10::Storage storage, DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key) | bits(t), t.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

c10::Storage adopted(const c10::Storage& own, DeviceIndex device) {
  auto bytes = own.nbytes();
  void* data = own.mutable_data();
  auto* block = new Block{data, static_cast<int64_t>(bytes), device, own};
  take(device, block->bytes);
  return {c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(data, block, &free_block, Device(SIM, device)),
          &allocator, true};
}

class Aliases {
 public:
  explicit Aliases(DeviceIndex device) : device_(device) {}

  Tensor of(const Tensor& t) {
    if (!on_sim(t)) return t;
    for (auto& pair : pairs_)
      if (pair.first.is_same(t)) return pair.second;
    TORCH_CHECK(t.layout() == at::kStrided, "cuda" ": only strided tensors, got ", t.layout());
    auto* key = t.storage().unsafeGetStorageImpl();
    auto found = cpu_.find(key);
    if (found == cpu_.end()) {
      const auto& own = t.storage();
      c10::Storage made(c10::Storage::use_byte_size_t(), own.nbytes(),
                        c10::DataPtr(const_cast<void*>(own.data()), nullptr, &nothing, c10::kCPU),
                        c10::GetCPUAllocator(), true);
      sim_.emplace(made.unsafeGetStorageImpl(), own);
      found = cpu_.emplace(key, std::move(made)).first;
    }
    pairs_.emplace_back(t, like(t, found->second, DispatchKey::CPU));
    return pairs_.back().second;
  }

  // What a kernel did to the arguments besides their values: resized them.
  void finish() {
    for (auto& [cpu, sim] : sim_) {
      auto data = cpu->mutable_data();
      if (data == sim.mutable_data() && cpu->nbytes() == sim.nbytes()) continue;
      if (data == sim.mutable_data()) { sim.set_nbytes(cpu->nbytes()); continue; }
      auto own = adopted(c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(cpu)), device_);
      sim.set_data_ptr_noswap(c10::DataPtr(std::move(own.unsafeGetStorageImpl()->mutable_data_ptr())));
      sim.set_nbytes(cpu->nbytes());
    }
    for (auto& [sim, cpu] : pairs_) {
      if (sim.sizes() == cpu.sizes() && sim.strides() == cpu.strides() && sim.storage_offset() == cpu.storage_offset())
        continue;
      sim.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }

  Tensor back(const Tensor& t) {
    if (!t.defined() || !t.device().is_cpu() || t.layout() != at::kStrided) return t;  // sparse results stay there
    for (auto& pair : pairs_)
      if (pair.second.is_same(t)) return pair.first;
    auto* key = t.storage().unsafeGetStorageImpl();
    auto found = sim_.find(key);
    if (found == sim_.end()) found = sim_.emplace(key, adopted(t.storage(), device_)).first;
    return like(t, found->second, KEY);
  }

 private:
  DeviceIndex device_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> cpu_, sim_;
};

// ---------------------------------------------------------------- the boxed kernel of all operators

struct Names {
  std::unordered_set<std::string> scalars;    // `device_check: NoCheck`: CPU tensors of no dimension are allowed
  std::unordered_set<std::string> unchecked;  // arguments may be on the CPU
  std::unordered_set<std::string> tf32;       // float32 arguments are rounded to TF32
  std::unordered_set<std::string> noisy;      // results differ in the last bit, as sums by atomics do
} names;

const std::unordered_set<std::string> NO_KERNEL = {
    "aten::view", "aten::as_strided", "aten::_reshape_alias", "aten::unfold", "aten::resize_", "aten::alias",
    "aten::detach", "aten::is_set_to", "aten::empty.memory_format", "aten::empty_strided", "aten::_conj",
    "aten::set_", "aten::view_as_real", "aten::view_as_complex", "aten::is_same_size", "aten::real", "aten::imag"};

struct Excluded {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

template <class F>
void each_tensor(const IValue& value, const F& f) {
  if (value.isTensor()) f(value.toTensor());
  else if (value.isTensorList())
    for (const Tensor& t : value.toTensorList()) f(t);
  else if (value.isOptionalTensorList())
    for (const std::optional<Tensor>& t : value.toOptionalTensorList())
      if (t) f(*t);
}

IValue mapped(const IValue& value, const std::function<Tensor(const Tensor&)>& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorList()) list.push_back(f(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& t : value.toOptionalTensorList())
      list.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : std::optional<Tensor>());
    return list;
  }
  return value;
}

Tensor to_tf32(const Tensor& t) {
  if (!t.defined() || t.scalar_type() != at::kFloat) return t;
  auto made = at::empty_like(t).copy_(t);
  if (!made.is_non_overlapping_and_dense()) made = made.contiguous();
  auto* x = static_cast<uint32_t*>(made.mutable_data_ptr());
  for (int64_t i = 0; i < made.numel(); i++)
    if ((x[i] & 0x7f800000u) != 0x7f800000u) x[i] = (x[i] + 0x0fffu + ((x[i] >> 13) & 1u)) & ~0x1fffu;
  return made;
}

void add_noise(const Tensor& t) {
  if (!t.defined() || !t.device().is_cpu() || !t.is_floating_point()) return;
  static at::Generator random = at::detail::createCPUGenerator(c10::detail::getNonDeterministicRandom());
  const double eps = t.scalar_type() == at::kDouble ? 2.3e-16 : t.scalar_type() == at::kFloat ? 1.2e-7 : 0;
  const_cast<Tensor&>(t).mul_(at::randint(-1, 2, t.sizes(), random, t.options()).mul_(eps).add_(1));
}

bool is_index(const std::string& name) {
  return name.rfind("aten::index.", 0) == 0 || name.rfind("aten::index_put", 0) == 0 ||
         name.rfind("aten::_index_put_impl", 0) == 0 || name.rfind("aten::_unsafe_index", 0) == 0;
}

void run_boxed(const OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto n = schema.arguments().size(), begin = stack->size() - n;
  std::string name = schema.name();
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  std::vector<IValue> given(stack->begin() + begin, stack->end());

  // 1. the device, and whether devices are mixed
  std::optional<Device> device;
  for (const auto& value : given)
    each_tensor(value, [&](const Tensor& t) {
      if (!on_sim(t)) return;
      if (!device) device = t.device();
      TORCH_CHECK(*device == t.device() || name == "aten::_copy_from",
                  "Expected all tensors to be on the same device, but found at least two devices, ", *device,
                  " and ", t.device(), "!");
    });
  for (const auto& value : given)
    if (value.isDevice() && !device) device = value.toDevice();
  if (!device || device->type() != SIM || device->index() < 0) device = Device(SIM, current);
  const bool scalars = names.scalars.count(name) > 0, unchecked = names.unchecked.count(name) > 0;
  bool masks = false;
  for (size_t i = 0; i < n; i++) {
    const auto& argument = schema.arguments()[i];
    const bool indices = is_index(name) && argument.name() == "indices";
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    each_tensor(given[i], [&](const Tensor& t) {
      if (!t.defined()) return;
      masks = masks || (indices && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte));
      if (!t.device().is_cpu() || unchecked) return;
      if (indices) return count("h2d", name, true);
      if (t.dim() == 0 && !written && (scalars || is_index(name))) return;
      if (scalars || written)
        TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *device,
                    " and cpu!");
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but got ", argument.name(),
                  " is on cpu, different from other tensors on ", *device,
                  " (when checking argument in method wrapper_" "cuda" "_", name, ")");
    });
  }

  // 2. counts
  if (!NO_KERNEL.count(name)) count("launch", name.substr(6), false);
  const auto data_dependent = op.hasTag(at::Tag::data_dependent_output) ||
                              (op.hasTag(at::Tag::dynamic_output_shape) && !is_index(name));
  if (data_dependent || masks) count("sync", name.substr(6), true);

  // 3. the call on the CPU
  Excluded below;
  Aliases aliases(device->index());
  const bool tf32 = !names.tf32.empty() && names.tf32.count(name) > 0;
  std::optional<at::Generator> drawn;
  bool takes_generator = false, swapped = false;
  for (size_t i = 0; i < n; i++) {
    auto& value = (*stack)[begin + i];
    const auto type = schema.arguments()[i].type()->str();
    if (type.rfind("Generator", 0) == 0) {
      takes_generator = true;
      at::Generator own = value.isNone() ? default_generator(device->index()) : value.toGenerator();
      TORCH_CHECK(own.device().type() == SIM, "Expected a '" "cuda" "' device type for generator but found '",
                  own.device().type(), "'");
      drawn = static_cast<SimGenerator*>(own.unsafeGetGeneratorImpl())->next();
      value = *drawn;
    } else if (value.isDevice()) {
      value = Device(c10::kCPU);
    } else {
      value = mapped(value, [&](const Tensor& t) { return aliases.of(t); });
      if (tf32 && !(schema.arguments()[i].alias_info() && schema.arguments()[i].alias_info()->isWrite()))
        value = mapped(value, to_tf32);
    }
  }
  c10::intrusive_ptr<c10::TensorImpl> before;
  at::Generator host = at::detail::getDefaultCPUGenerator();
  if (!takes_generator && !LIKE_CPU && op.hasTag(at::Tag::nondeterministic_seeded)) {
    swapped = true;
    std::lock_guard<std::mutex> lock(host.mutex());
    before = host.unsafeGetGeneratorImpl()->get_state();
    auto own = static_cast<SimGenerator*>(default_generator(device->index()).unsafeGetGeneratorImpl())->next();
    host.unsafeGetGeneratorImpl()->set_state(*own.unsafeGetGeneratorImpl()->get_state());
  }
  auto restore = [&] {
    if (!swapped) return;
    std::lock_guard<std::mutex> lock(host.mutex());
    host.unsafeGetGeneratorImpl()->set_state(*before);
  };
  try {
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  } catch (...) {
    restore();
    aliases.finish();
    throw;
  }
  restore();

  // 4. what it returns
  aliases.finish();
  const auto results = schema.returns().size(), first = stack->size() - results;
  if (!names.noisy.empty() && names.noisy.count(name) > 0)
    for (size_t i = first; i < stack->size(); i++) each_tensor((*stack)[i], add_noise);
  for (size_t i = first; i < stack->size(); i++)
    (*stack)[i] = mapped((*stack)[i], [&](const Tensor& t) { return aliases.back(t); });
}

// ---------------------------------------------------------------- operators of their own

Device resolved(std::optional<Device> d) {
  return Device(SIM, d && d->index() >= 0 ? d->index() : current);
}

Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<Device> device, std::optional<bool>,
                           std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(resolved(device));
  return at::detail::empty_generic(size, &allocator, DispatchKeySet(KEY), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(resolved(device));
  return at::detail::empty_strided_generic(size, stride, &allocator, DispatchKeySet(KEY), c10::dtype_or_default(dtype));
}

struct NoMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t) override { return {nullptr, nullptr, &nothing, Device(SIM, current)}; }
  c10::DeleterFnPtr raw_deleter() const override { return &nothing; }
  void copy_data(void*, const void*, size_t) const override {}
} no_memory;

Tensor efficient_zeros(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                       std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(resolved(device));
  return at::detail::empty_generic(size, &no_memory, DispatchKeySet(KEY) | DispatchKeySet(DispatchKey::ZeroTensor),
                                   c10::dtype_or_default(dtype), std::nullopt);
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (self._is_zerotensor()) return to.zero_();
  const bool out = on_sim(self), in = on_sim(to);
  const std::string how = non_blocking ? "copy non_blocking" : "copy";
  if (out && in) count("launch", "copy_", false);
  else count(out ? "d2h" : "h2d", how, !non_blocking);
  Excluded below;
  Aliases aliases(in ? to.device().index() : self.device().index());
  auto from = aliases.of(self), target = aliases.of(to);
  target.copy_(from);
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

// torch calls _copy_from for devices that it does not know, but that would resolve lazy conjugates for ever
Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  if (!self.is_same(from)) copy_from(from, self, non_blocking);
  return self;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  count("sync", "_local_scalar_dense", true);
  Excluded below;
  Aliases aliases(self.device().index());
  return at::_local_scalar_dense(aliases.of(self));
}

Tensor view(const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

Tensor& set_to(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", source.device(), "\".");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.empty() && !size.empty()) impl->set_sizes_contiguous(size), impl->set_storage_offset(offset);
  else impl->set_sizes_and_strides(size, stride, offset);
  return self;
}
Tensor& set_storage(Tensor& self, c10::Storage source) {
  int64_t numel = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_to(self, std::move(source), 0, {numel}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_to(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_empty(Tensor& self) {
  return set_to(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &allocator, true), 0, {0}, {1});
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_boxed>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", efficient_zeros);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_to);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
}

PYBIND11_MODULE(_simulated_cuda, m) {
  m.def("install", [](const std::vector<std::string>& scalars, const std::vector<std::string>& unchecked,
                      const std::vector<std::string>& with_kernels) {
    names.scalars.insert(scalars.begin(), scalars.end());
    names.unchecked.insert(unchecked.begin(), unchecked.end());
    // operators with a kernel of their own on CUDA are one launch, not the composite of several
    static torch::Library library(torch::Library::IMPL, "aten", KEY, __FILE__, __LINE__);
    for (const auto& name : with_kernels)
      library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_boxed>());
  });
  m.def("counts", [] {
    std::lock_guard<std::mutex> lock(counter_mutex);
    return counters;
  });
  m.def("reset_counts", [] {
    std::lock_guard<std::mutex> lock(counter_mutex);
    counters.clear();
  });
  m.def("set_tf32", [](const std::vector<std::string>& given) { names.tf32 = {given.begin(), given.end()}; });
  m.def("set_noisy", [](const std::vector<std::string>& given) { names.noisy = {given.begin(), given.end()}; });
  m.def("set_counting", [](bool on) { counting = on; });
  m.def("set_listener", [](py::object f) {
    delete listener;
    listener = f.is_none() ? nullptr : new py::object(std::move(f));
  });
  m.def("device_count", [] { return int(DEVICES); });
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int d) {
    TORCH_CHECK(d < DEVICES, "invalid device ordinal");
    if (d >= 0) current = DeviceIndex(d);
  });
  m.def("default_generator", [](int d) {
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_generator(DeviceIndex(d))));
  });
  m.def("memory", [](int d) {
    return std::make_tuple(memory[d].now.load(), memory[d].peak.load(), memory[d].allocations.load());
  });
  m.def("reset_peak", [](int d) { memory[d].peak = memory[d].now.load(); });
  m.def("synchronize", [] { count("sync", "synchronize", true); });
}

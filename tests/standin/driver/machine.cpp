#include "machine.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <vector>

#include "calls.h"

namespace standin {
namespace {

enum class Stage : unsigned char { fresh, running, forked, ended };

struct Primary {
  int device = 0;
  int retained = 0;
};

struct Machine {
  std::atomic<Stage> stage{Stage::fresh};
  std::mutex mutex;
  std::vector<int> visible;  // their numbers without CUDA_VISIBLE_DEVICES
  std::size_t bytes = 0;
  bool has_memory_pools = true;
  std::vector<Primary> contexts;
};

// Never destroyed: calls may come from static destructors.
Machine& machine() {
  static auto* const kInstance = new Machine;
  return *kInstance;
}

thread_local std::vector<CUcontext> current_contexts;

std::size_t number_from(const char* variable, std::size_t otherwise) {
  const char* const text = std::getenv(variable);
  if (text == nullptr) return otherwise;
  char* end = nullptr;
  const unsigned long long number = std::strtoull(text, &end, 10);
  if (end == text || *end != '\0' || number == 0) die("cuInit", std::string(variable) + "=" + text + " is no number");
  return number;
}

// As CUDA reads it: numbers up to the first that names no device.
std::vector<int> visible_devices(int count) {
  std::vector<int> found;
  const char* const text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (text == nullptr) {
    for (int device = 0; device < count; ++device) found.push_back(device);
    return found;
  }
  std::istringstream list(text);
  for (std::string item; std::getline(list, item, ',');) {
    char* end = nullptr;
    const long device = std::strtol(item.c_str(), &end, 10);
    const bool listed = std::find(found.begin(), found.end(), device) != found.end();
    if (end == item.c_str() || *end != '\0' || device < 0 || device >= count || listed) break;
    found.push_back(static_cast<int>(device));
  }
  return found;
}

void leave(Stage next) {
  Stage running = Stage::running;
  machine().stage.compare_exchange_strong(running, next);
}

}  // namespace

void die(const std::string& call, const std::string& what) {
  std::fprintf(stderr, "CUDA stand-in: %s: %s\n", call.c_str(), what.c_str());
  std::fflush(stderr);
  std::abort();
}

CUresult initialise() {
  Machine& here = machine();
  if (here.stage == Stage::forked) return CUDA_ERROR_NOT_INITIALIZED;
  const std::lock_guard<std::mutex> lock(here.mutex);
  if (here.stage == Stage::ended) return CUDA_ERROR_DEINITIALIZED;
  if (here.stage == Stage::running) return CUDA_SUCCESS;
  here.visible = visible_devices(static_cast<int>(number_from("STANDIN_DEVICES", 1)));
  if (here.visible.empty()) return CUDA_ERROR_NO_DEVICE;
  here.bytes = number_from("STANDIN_DEVICE_BYTES", std::size_t{16} << 30U);
  const char* const pools = std::getenv("STANDIN_MEMORY_POOLS");
  here.has_memory_pools = pools == nullptr || std::string(pools) != "0";
  for (std::size_t device = 0; device < here.visible.size(); ++device) {
    here.contexts.push_back({static_cast<int>(device), 0});
  }
  pthread_atfork(nullptr, nullptr, [] { leave(Stage::forked); });
  // Before the destructors of whatever was constructed until now.
  (void)std::atexit([] { leave(Stage::ended); });
  here.stage = Stage::running;
  return CUDA_SUCCESS;
}

CUresult enter(const char* call, Needs needs) {
  // First: another thread may have held any lock when the process forked.
  if (machine().stage == Stage::forked) return CUDA_ERROR_NOT_INITIALIZED;
  if (const CUresult failure = count_call(call); failure != CUDA_SUCCESS) return failure;
  switch (machine().stage.load()) {
    case Stage::forked:
      return CUDA_ERROR_NOT_INITIALIZED;
    case Stage::ended:
      return CUDA_ERROR_DEINITIALIZED;
    case Stage::fresh:
      return needs == Needs::nothing ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
    case Stage::running:
      break;
  }
  if (needs == Needs::context && current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return CUDA_SUCCESS;
}

int device_count() { return static_cast<int>(machine().visible.size()); }
std::size_t device_bytes() { return machine().bytes; }
bool has_memory_pools() { return machine().has_memory_pools; }
int physical_device(int device) { return machine().visible[static_cast<std::size_t>(device)]; }

CUcontext primary_context(int device) {
  return reinterpret_cast<CUcontext>(&machine().contexts[static_cast<std::size_t>(device)]);
}

int device_of(CUcontext context) {
  for (const Primary& primary : machine().contexts) {
    if (reinterpret_cast<const Primary*>(context) == &primary) return primary.device;
  }
  return -1;
}

void retain(int device) {
  const std::lock_guard<std::mutex> lock(machine().mutex);
  ++machine().contexts[static_cast<std::size_t>(device)].retained;
}

bool release(int device) {
  const std::lock_guard<std::mutex> lock(machine().mutex);
  int& retained = machine().contexts[static_cast<std::size_t>(device)].retained;
  if (retained == 0) return false;
  --retained;
  return true;
}

bool is_active(int device) {
  const std::lock_guard<std::mutex> lock(machine().mutex);
  return machine().contexts[static_cast<std::size_t>(device)].retained > 0;
}

CUcontext current_context() { return current_contexts.empty() ? nullptr : current_contexts.back(); }

int current_device() { return device_of(current_context()); }

void set_current(CUcontext context) {
  if (!current_contexts.empty()) current_contexts.pop_back();
  if (context != nullptr) current_contexts.push_back(context);
}

void push_current(CUcontext context) { current_contexts.push_back(context); }

bool pop_current(CUcontext* out) {
  if (current_contexts.empty()) return false;
  if (out != nullptr) *out = current_contexts.back();
  current_contexts.pop_back();
  return true;
}

}  // namespace standin

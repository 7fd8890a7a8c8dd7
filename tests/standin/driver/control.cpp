#include "control.h"

#include <memory>
#include <utility>
#include <vector>

#include "calls.h"
#include "machine.h"
#include "memory.h"
#include "queue.h"

namespace {

using namespace standin;  // NOLINT(google-build-using-namespace)

CUresult submit_job(CUstream stream, Job job) {
  Lock lock(world().mutex);
  return submit(lock, stream_of(stream, job.call.c_str()), std::make_shared<const Job>(std::move(job)));
}

}  // namespace

extern "C" {

void standin_hold(CUstream stream) {
  const Lock lock(world().mutex);
  stream_of(stream, __func__).held = true;
}

void standin_release(CUstream stream) {
  Lock lock(world().mutex);
  stream_of(stream, __func__).held = false;
  pump(lock);
}

CUresult standin_sleep(CUstream stream, double ms) {
  STANDIN_ENTER(Needs::context);
  Job job;
  job.call = __func__;
  job.takes = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double, std::milli>(ms));
  return submit_job(stream, std::move(job));
}

CUresult standin_launch(CUstream stream, const char* name, void (*function)(void*), void (*end)(void*), void* data,
                        const StandinRange* ranges, std::size_t count) {
  const std::shared_ptr<void> kept(data, end);
  STANDIN_ENTER(Needs::context);
  Job job;
  job.call = name;
  job.run = [kept, function, call = std::string(name),
             used = std::vector<StandinRange>(ranges, ranges + count)](int device) {
    for (const StandinRange& range : used) {
      Memory::instance().must_reach(call, device, range.address, range.size, range.writes != 0,
                                    /*across_devices=*/false);
    }
    function(kept.get());
  };
  return submit_job(stream, std::move(job));
}

std::size_t standin_calls(const char* name) { return calls_of(name); }

void standin_fail(const char* name, std::size_t nth, int code) { fail_call(name, nth, static_cast<CUresult>(code)); }

void standin_fail_no_more() { fail_no_more(); }

int standin_enter(const char* name) { return count_call(name); }
}

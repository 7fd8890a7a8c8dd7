#include "core/device/refusal.h"

#include <algorithm>
#include <cmath>

namespace vmm {

namespace {

// As format_bytes(), never less than `bytes`: "8.1 MiB" for 8 MiB and a byte.
std::string at_least(std::size_t bytes) {
  std::size_t unit = 1;
  while (unit < kTiB && bytes >= 1024 * unit) unit *= 1024;
  const double tenths = std::ceil(10.0 * static_cast<double>(bytes) / static_cast<double>(unit));
  return format_bytes(static_cast<std::size_t>(std::ceil(tenths / 10.0 * static_cast<double>(unit))));
}

// Of more a sentence names those that hold most, and tells of the others together: of a
// thousand models it was 40 KB.
constexpr std::size_t kMostNamed = 16;

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (std::size_t k = 0; k < parts.size(); ++k) {
    if (k != 0) text += k + 1 < parts.size() ? ", " : parts.size() > 2 ? ", or " : " or ";
    text += parts[k];
  }
  return text;
}

std::string words_of(const Holder& holder) {
  std::string text = "'" + holder.name + "' " + format_bytes(holder.allocated) + " in use";
  if (holder.idle != 0) text += " + " + format_bytes(holder.idle) + " idle";
  if (holder.stranded != 0) text += " + " + format_bytes(holder.stranded) + " stranded";
  if (holder.quarantined != 0) text += " + " + format_bytes(holder.quarantined) + " waiting for queued work";
  if (holder.floor != 0) {
    text += " (its floor of " + format_bytes(holder.floor) + " ";
    if (holder.idle != 0) text += "keeps what is idle";
    if (holder.idle != 0 && holder.reserved != 0) text += " and ";
    if (holder.reserved != 0) text += "reserves another " + format_bytes(holder.reserved);
    text += ')';
  }
  return text;
}

}  // namespace

std::string advice_for(const Refusal& refusal, const RefusalCause& cause) {
  const bool device_is_known = cause.device_total != 0;
  if (device_is_known && refusal.requested > cause.device_total) {
    return "ask for less: the device has " + format_bytes(cause.device_total) + " in all";
  }
  std::vector<std::string> ways;
  if (cause.takes_whole_pages) {
    ways.emplace_back(
        "watch fewer blocks: TORCH_VMM_DEBUG=guard takes whole pages for each, guard,sample=1/100 for one "
        "of a hundred");
  }
  if (cause.no_addresses) {
    if (refusal.requested <= cause.capacity) ways.emplace_back("free tensors until a stretch that long is free");
    ways.push_back("give the pool a larger virtual capacity (it has " + format_bytes(cause.capacity) + ")");
    return joined(ways);
  }
  // Memory comes in whole pages, and less than one is none.
  const std::size_t available = align_down(refusal.available, cause.page);
  std::size_t missing = refusal.requested - std::min(available, refusal.requested);
  const std::size_t whole = align_up(refusal.requested, cause.page);
  std::size_t more = whole - std::min(refusal.available, whole);
  std::string above;  // limits that would refuse next
  for (std::size_t k = 0; k < cause.rises.size(); ++k) {
    const RefusalCause::Rise& rise = cause.rises[k];
    missing = k == 0 ? rise.for_bytes : std::max(missing, rise.for_bytes);
    if (k == 0) more = rise.for_pages;
    if (k != 0) above += " and that of " + rise.name + " by " + at_least(rise.for_pages);
  }
  std::size_t in_use = 0;
  std::size_t may_come = 0;  // once all that is in use has been freed
  for (const Holder& holder : refusal.holders) {
    in_use += holder.allocated;
    may_come += holder.allocated + holder.stranded + holder.quarantined;
  }
  if (in_use != 0 && may_come >= missing) {
    ways.push_back(missing == 0        ? "free tensors"
                   : missing <= in_use ? "free tensors of " + at_least(missing)
                                       : "free the tensors that keep chunks of " + at_least(missing));
  }
  if (!cause.limit_name.empty() &&
      (!device_is_known || refusal.limit + std::max(more, std::size_t{1}) <= cause.device_total)) {
    ways.push_back("raise the limit of " + cause.limit_name + (more == 0 ? "" : " by " + at_least(more)) + above);
  }
  if (cause.spill != 0) ways.push_back("raise spill_limit by " + at_least(cause.spill));
  std::size_t named = 0;
  for (const Holder& holder : refusal.holders) {
    const std::size_t kept = std::min(holder.floor, holder.idle + holder.reserved);
    if (kept == 0 || kept < missing || ++named > kMostNamed) continue;  // by itself it would not do
    ways.push_back("give '" + holder.name + "' a lower floor: it keeps " + format_bytes(kept) +
                   (holder.reserved == 0 ? " idle" : ""));
  }
  if (cause.limit_name.empty() && cause.outside != 0) {
    ways.push_back("free memory outside torch_vmm: others hold " + format_bytes(cause.outside) + " of the device");
  }
  if (ways.empty()) ways.emplace_back("ask for less");
  return joined(ways);
}

std::string text_of(const Refusal& refusal, const RefusalCause& cause) {
  std::string text = "pool '" + refusal.pool + "': " + format_bytes(refusal.requested) + " asked";
  if (cause.no_addresses) {
    text += "; no free stretch of addresses that long in its virtual capacity of " + format_bytes(cause.capacity);
  }
  text += cause.limits;
  if (cause.device_total != 0) {
    text += "; device: " + format_bytes(cause.device_total) + ", free " + format_bytes(cause.device_free);
  }
  if (!cause.limit_name.empty()) text += "; refused by the limit of " + cause.limit_name;
  if (!cause.driver_said.empty()) text += "; the driver refused (" + cause.driver_said + ")";
  const std::vector<Holder>& holders = refusal.holders;
  // One more is no longer than what would be said of it.
  const std::size_t named = holders.size() <= kMostNamed + 1 ? holders.size() : kMostNamed;
  std::size_t of_others = 0;
  for (std::size_t k = 0; k < holders.size(); ++k) {
    if (k < named) {
      text += (k == 0 ? "\n  held: " : ", ") + words_of(holders[k]);
    } else {
      of_others += holders[k].held();
    }
  }
  if (named < holders.size()) {
    text += ", and " + std::to_string(holders.size() - named) + " others " + format_bytes(of_others);
  }
  return text + "\n  what would help: " + refusal.advice;
}

}  // namespace vmm

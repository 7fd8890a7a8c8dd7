#include "core/pool/idle_look.h"

namespace vmm {

bool IdleLook::is_in_vain(const WantedChunks& wanted, Moment now, Epoch passed) const {
  if (when_ != now) return false;
  const std::size_t least_unit = wanted.unit == unit_ ? least_unit_ : 0;
  if ((wanted.unit == 0 ? least_ : least_unit) > wanted.most) return true;
  return wanted.is_unused && wanted.most <= in_use_ && in_use_at_ == passed;
}

void IdleLook::becomes(const IdleLook& look) {
  if (look.unit_ != 0 || when_ != look.when_) *this = look;
}

void IdleLook::note_in_use(std::size_t most, Epoch passed) {
  in_use_ = most;
  in_use_at_ = passed;
}

}  // namespace vmm

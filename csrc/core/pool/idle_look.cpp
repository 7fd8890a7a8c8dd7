#include "core/pool/idle_look.h"

namespace vmm {

bool IdleLook::is_in_vain(const WantedChunks& wanted, Moment now, Epoch passed) const {
  if (when_ != now) return false;
  const std::size_t least_unit = wanted.unit == unit_ ? least_unit_ : 0;
  if ((wanted.unit == 0 ? least_ : least_unit) > wanted.most) return true;
  if (!wanted.is_unused) return false;
  const InUse& in_use = wanted.unit != 0 ? units_in_use_ : any_in_use_;
  if (wanted.unit != in_use.unit || wanted.most > in_use.most || in_use.at != passed) return false;
  return !wanted.but_by.has_value() || wanted.but_by == in_use.but_by;
}

void IdleLook::becomes(const IdleLook& look) {
  if (look.unit_ != 0 || when_ != look.when_) *this = look;
}

void IdleLook::note_in_use(const WantedChunks& wanted, Epoch passed) {
  (wanted.unit != 0 ? units_in_use_ : any_in_use_) = {wanted.most, wanted.unit, wanted.but_by, passed};
}

}  // namespace vmm

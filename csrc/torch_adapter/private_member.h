// A way to the few private members of torch's classes without which torch
// cannot be put right: an explicit instantiation may name private members.
//
//   struct Kind { using Type = int Class::*; friend Type member_of(Kind); };
//   template struct PrivateMember<Kind, &Class::kind_>;
//   object.*member_of(Kind{})
//
// The tag (`Kind`) stands in namespace vmm itself, where the friend above is.
#pragma once

namespace vmm {

template <typename Which, typename Which::Type kMember>
struct PrivateMember {
  friend typename Which::Type member_of(Which /*which*/) { return kMember; }
};

}  // namespace vmm

#include "torch_adapter/debug_info_chain.h"

#include <utility>
#include <vector>

#include "torch_adapter/private_member.h"

namespace vmm {

namespace {

using Link = c10::ThreadLocalDebugInfo;
using LinkPtr = std::shared_ptr<Link>;
using InfoPtr = std::shared_ptr<c10::DebugInfoBase>;

struct Info {
  using Type = InfoPtr Link::*;
  friend Type member_of(Info which);
};
struct Kind {
  using Type = c10::DebugInfoKind Link::*;
  friend Type member_of(Kind which);
};
struct Parent {
  using Type = LinkPtr Link::*;
  friend Type member_of(Parent which);
};

}  // namespace

template struct PrivateMember<Info, &Link::info_>;
template struct PrivateMember<Kind, &Link::kind_>;
template struct PrivateMember<Parent, &Link::parent_info_>;

namespace {

LinkPtr make_link(c10::DebugInfoKind kind, InfoPtr info, LinkPtr parent) {
  auto link = std::make_shared<Link>();
  (*link).*member_of(Kind{}) = kind;
  (*link).*member_of(Info{}) = std::move(info);
  (*link).*member_of(Parent{}) = std::move(parent);
  return link;
}

}  // namespace

void set_debug_info_beneath(c10::DebugInfoKind kind, InfoPtr info, bool (*is_ours)(const c10::DebugInfoBase&)) {
  std::vector<LinkPtr> above;
  LinkPtr link = Link::current();
  for (; link != nullptr; link = (*link).*member_of(Parent{})) {
    const InfoPtr& held = (*link).*member_of(Info{});
    if ((*link).*member_of(Kind{}) == kind && held != nullptr && is_ours(*held)) break;
    above.push_back(link);
  }
  LinkPtr base = link == nullptr ? nullptr : (*link).*member_of(Parent{});
  if (info != nullptr) base = make_link(kind, std::move(info), std::move(base));
  for (auto it = above.rbegin(); it != above.rend(); ++it) {
    base = make_link((**it).*member_of(Kind{}), (**it).*member_of(Info{}), std::move(base));
  }
  Link::_forceCurrentDebugInfo(std::move(base));
}

}  // namespace vmm

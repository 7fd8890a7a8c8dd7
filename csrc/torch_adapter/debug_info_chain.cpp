#include "torch_adapter/debug_info_chain.h"

#include <utility>
#include <vector>

#include "torch_adapter/private_member.h"

namespace vmm {

using Link = c10::ThreadLocalDebugInfo;
using LinkPtr = std::shared_ptr<Link>;
using InfoPtr = std::shared_ptr<c10::DebugInfoBase>;

struct LinkInfo {
  using Type = InfoPtr Link::*;
  friend Type member_of(LinkInfo which);
};
struct LinkKind {
  using Type = c10::DebugInfoKind Link::*;
  friend Type member_of(LinkKind which);
};
struct LinkParent {
  using Type = LinkPtr Link::*;
  friend Type member_of(LinkParent which);
};

template struct PrivateMember<LinkInfo, &Link::info_>;
template struct PrivateMember<LinkKind, &Link::kind_>;
template struct PrivateMember<LinkParent, &Link::parent_info_>;

namespace {

LinkPtr make_link(c10::DebugInfoKind kind, InfoPtr info, LinkPtr parent) {
  auto link = std::make_shared<Link>();
  (*link).*member_of(LinkKind{}) = kind;
  (*link).*member_of(LinkInfo{}) = std::move(info);
  (*link).*member_of(LinkParent{}) = std::move(parent);
  return link;
}

}  // namespace

void set_debug_info_beneath(c10::DebugInfoKind kind, InfoPtr info, bool (*is_ours)(const c10::DebugInfoBase&)) {
  std::vector<LinkPtr> above;
  LinkPtr link = Link::current();
  for (; link != nullptr; link = (*link).*member_of(LinkParent{})) {
    const InfoPtr& held = (*link).*member_of(LinkInfo{});
    if ((*link).*member_of(LinkKind{}) == kind && held != nullptr && is_ours(*held)) break;
    above.push_back(link);
  }
  LinkPtr base = link == nullptr ? nullptr : (*link).*member_of(LinkParent{});
  if (info != nullptr) base = make_link(kind, std::move(info), std::move(base));
  for (auto it = above.rbegin(); it != above.rend(); ++it) {
    base = make_link((**it).*member_of(LinkKind{}), (**it).*member_of(LinkInfo{}), std::move(base));
  }
  Link::_forceCurrentDebugInfo(std::move(base));
}

}  // namespace vmm

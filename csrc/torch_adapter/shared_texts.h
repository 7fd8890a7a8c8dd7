// Texts that many hold and few differ, once each. It lets go of what nobody else holds,
// so that it is as large as what is in use, however many names came and went; it never
// knows what a text means.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

namespace vmm {

// Guarded by its owner.
class SharedTexts {
 public:
  using Text = std::shared_ptr<const std::string>;

  // The one text for `key`; `make()` says it the first time.
  template <typename Make>
  Text find(const std::string& key, const Make& make) {
    if (const auto known = texts_.find(key); known != texts_.end()) return known->second;
    if (texts_.size() >= most_) {
      // Only find() gives copies out, so one that nobody else has stays that way.
      std::erase_if(texts_, [](const auto& each) { return each.second.use_count() == 1; });
      most_ = std::max(kFewest, 2 * texts_.size());  // a walk for each that doubled them, none for each that came
    }
    Text made = std::make_shared<const std::string>(make());
    texts_.emplace(key, made);
    return made;
  }
  void clear() {
    texts_.clear();
    most_ = kFewest;
  }
  [[nodiscard]] std::size_t size() const { return texts_.size(); }

  static constexpr std::size_t kFewest = 64;  // before it looks for what nobody holds

 private:
  std::unordered_map<std::string, Text> texts_;
  std::size_t most_ = kFewest;
};

}  // namespace vmm

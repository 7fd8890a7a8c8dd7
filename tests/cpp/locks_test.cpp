// The table of locks in docs/design.md is all there is to go by where one is added: it
// names every lock that the code has, and none that it has not.
#include <gtest/gtest.h>

#include <cctype>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace vmm::testing {
namespace {

namespace fs = std::filesystem;

struct Lock {
  std::string file;        // "core/pool/pool.h"
  std::string owner;       // "Pool"
  std::string name;        // "mutex_"
  bool is_shared = false;  // another's, by reference
};

// Of each class, or of a struct that a source has for itself. What stands deeper than a
// class is its own.
std::vector<Lock> locks_in(std::istream& text, const std::string& file) {
  static const std::regex kClass(R"(^(\s*)(?:class|struct)\s+(?:VMM_\w+(?:\([^)]*\))?\s+)?([\w:]+)[^;]*$)");
  static const std::regex kLock(
      R"(^(\s*)(?:mutable |static |inline )*(?:std::)?(?:recursive_mutex|mutex|Mutex)(&?)\s+(\w+);)");
  std::vector<Lock> found;
  std::vector<std::pair<std::ptrdiff_t, std::string>> owners;  // by how deep they stand
  std::smatch match;
  for (std::string line; std::getline(text, line);) {
    const bool is_class = std::regex_search(line, match, kClass);
    if (!is_class && !std::regex_search(line, match, kLock)) continue;
    const std::ptrdiff_t depth = match.length(1);
    while (!owners.empty() && owners.back().first >= depth) owners.pop_back();
    if (is_class) {
      owners.emplace_back(depth, match[2]);
    } else {
      found.push_back({file, owners.empty() ? "" : owners.back().second, match[3], match[2] == "&"});
    }
  }
  return found;
}

// "core/blocks/block_space.cpp" has what the house calls BlockSpace.
std::string class_of(const fs::path& file) {
  std::string name;
  bool begins = true;
  for (const char letter : file.stem().string()) {
    if (letter != '_') name += begins ? static_cast<char>(std::toupper(letter)) : letter;
    begins = letter == '_';
  }
  return name;
}

// All but the drivers', which are the last of the leaves, and what locks are made of.
std::vector<Lock> all_locks() {
  std::vector<Lock> all;
  const fs::path root = VMM_CSRC;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    const std::string extension = entry.path().extension();
    if (extension != ".h" && extension != ".cpp") continue;
    const fs::path file = fs::relative(entry.path(), root);
    if (*file.begin() == "base" || *file.begin() == "driver") continue;
    std::ifstream text(entry.path());
    for (Lock& lock : locks_in(text, file.string())) all.push_back(std::move(lock));
  }
  return all;
}

// What the left column names: "Runtime::mutex_", "accessor_mutex_", "Depot".
std::set<std::string> named_in(std::istream& text) {
  static const std::regex kName("`([^`]+)`");
  std::set<std::string> names;
  bool is_there = false;
  for (std::string line; std::getline(text, line);) {
    if (line.rfind("## ", 0) == 0) is_there = line == "## Locks";
    if (!is_there || line.rfind("| ", 0) != 0) continue;
    const std::string column = line.substr(0, line.find(" | "));
    for (auto at = std::sregex_iterator(column.begin(), column.end(), kName); at != std::sregex_iterator(); ++at) {
      names.insert((*at)[1]);
    }
  }
  return names;
}

std::set<std::string> table() {
  std::ifstream text(fs::path(VMM_CSRC).parent_path() / "docs" / "design.md");
  return named_in(text);
}

// By what the table may call it. Where a class has several, each by its own name.
std::set<std::string> names_of(const Lock& lock, bool is_only_one) {
  const std::string full = lock.owner + "::" + lock.name;
  if (!is_only_one) return {full, lock.name};
  return {full, lock.owner, class_of(lock.file), fs::path(lock.file).replace_extension().string()};
}

TEST(Locks, TheTableNamesEachAndNoOther) {
  const std::vector<Lock> locks = all_locks();
  EXPECT_GT(locks.size(), 20U) << "no sources found in " << VMM_CSRC;
  std::map<std::string, int> own;  // of each class
  for (const Lock& lock : locks) own[lock.owner] += lock.is_shared ? 0 : 1;
  const std::set<std::string> named = table();
  std::set<std::string> known;
  for (const Lock& lock : locks) {
    const std::set<std::string> names = names_of(lock, own[lock.owner] <= 1);
    bool is_named = lock.is_shared;
    for (const std::string& name : names) is_named = is_named || named.count(name) != 0;
    EXPECT_TRUE(is_named) << lock.file << ": " << lock.owner << "::" << lock.name << " is not in the table";
    known.insert(names.begin(), names.end());
  }
  for (const std::string& name : named) EXPECT_EQ(known.count(name), 1U) << name << " is no lock";
}

// The test itself can fail.
TEST(Locks, AreSeenWhereverTheyStand) {
  std::istringstream code(
      "class VMM_CAPABILITY(\"x\") Shelf {\n  struct In {\n    int k;\n  };\n  mutable Mutex mutex_;\n  Mutex& "
      "others_;\n};\n"
      "struct Of::Inner {\n  std::recursive_mutex one_;  // why\n  MutexLock none_;\n};\n");
  std::string seen;
  for (const Lock& lock : locks_in(code, "core/shelf.h")) {
    seen += lock.owner + "::" + lock.name + (lock.is_shared ? "& " : " ");
  }
  EXPECT_EQ(seen, "Shelf::mutex_ Shelf::others_& Of::Inner::one_ ");
  std::istringstream document("| `No` | here |\n## Locks\n| `A::b_`, `c_`; `D`'s | `e` |\n## On\n| `F` | |\n");
  EXPECT_EQ(named_in(document), (std::set<std::string>{"A::b_", "D", "c_"}));
  EXPECT_EQ(class_of("core/blocks/block_space.cpp"), "BlockSpace");
}

}  // namespace
}  // namespace vmm::testing

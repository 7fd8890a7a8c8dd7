// Dependencies point down only. Reads the #includes of csrc/** and holds them
// against the house that docs/design.md describes.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace vmm::testing {
namespace {

namespace fs = std::filesystem;

struct Include {
  std::string file;  // "core/pool/pool.cpp"
  std::string what;  // "core/pool/pool.h", "cuda.h"
  bool system = false;
};

std::vector<Include> includes_in(std::istream& text, const std::string& file) {
  static const std::regex kInclude(R"(^\s*#\s*include\s*([<"])([^>"]+)[>"])");
  std::vector<Include> found;
  std::smatch match;
  for (std::string line; std::getline(text, line);) {
    if (std::regex_search(line, match, kInclude)) found.push_back({file, match[2], match[1] == "<"});
  }
  return found;
}

std::vector<Include> all_includes() {
  std::vector<Include> all;
  const fs::path root = VMM_CSRC;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    const std::string extension = entry.path().extension();
    if (extension != ".h" && extension != ".cpp" && extension != ".cu" && extension != ".cuh") continue;
    std::ifstream text(entry.path());
    for (auto& include : includes_in(text, fs::relative(entry.path(), root).string())) all.push_back(include);
  }
  return all;
}

std::string layer_of(const std::string& path) { return path.substr(0, path.find('/')); }

// The room of core that a file stands in: "core/pool/seals.cpp" in "pool".
// "": none, as core/options.h, which every room may know.
std::string room_of(const std::string& path) {
  const fs::path folder = fs::path(path).parent_path();
  return folder == "core" ? "" : folder.filename().string();
}

const std::vector<std::string> kLayers = {"base", "driver", "core", "ipc", "process", "torch_adapter", "bindings"};

// The rooms of core, lowest first; rooms of one row do not know each other.
const std::vector<std::vector<std::string>> kRooms = {
    {"limits", "streams"},
    {"blocks", "memory"},
    {"numbers", "debug", "backing"},
    {"cache"},
    {"pool"},
    {"device"},
    {"sleep"},
    {"faces"},
};

template <typename Rows, typename Has>
int rank(const Rows& rows, const Has& has) {
  const auto at = std::find_if(rows.begin(), rows.end(), has);
  return at == rows.end() ? -1 : static_cast<int>(at - rows.begin());
}
int layer_rank(const std::string& layer) {
  return rank(kLayers, [&](const std::string& known) { return known == layer; });
}
int room_rank(const std::string& room) {
  return rank(kRooms, [&](const auto& row) { return std::find(row.begin(), row.end(), room) != row.end(); });
}

// "" or what is wrong with this include.
std::string fault_of(const Include& include) {
  const std::string from = layer_of(include.file);
  const auto is = [&](const char* pattern) { return std::regex_search(include.what, std::regex(pattern)); };
  const bool torch = is(R"(^(torch|c10|ATen|caffe2|pybind11)/)") || is(R"(^Python\.h$)");
  const bool cuda = is(R"(^(cuda|cudart|nvml|driver_types|nvToolsExt|vector_types)[\w]*(\.h|/))");
  if (layer_rank(from) < 0) return "a layer that the test does not know";
  if (torch && layer_rank(from) < layer_rank("torch_adapter"))
    return "only the adapter and what stands above know torch";
  if (cuda && (from == "base" || from == "core")) return "core and base know no CUDA header";
  if (cuda && from == "driver" && fs::path(include.file).stem().string().rfind("cuda_", 0) != 0) {
    return "only the CUDA driver knows CUDA headers";
  }
  if (include.system) return "";
  const std::string to = layer_of(include.what);
  if (layer_rank(to) < 0) return "";
  if (layer_rank(to) > layer_rank(from)) return from + " must not know " + to;
  if (from != "core" || to != "core") return "";
  const std::string room = room_of(include.file);
  const std::string other = room_of(include.what);
  if (room == other || other.empty()) return "";
  if (room.empty()) return "what every room may know knows none";
  if (room_rank(room) < 0) return "give the room '" + room + "' its place in kRooms";
  if (room_rank(other) < 0) return "give the room '" + other + "' its place in kRooms";
  if (room_rank(other) < room_rank(room)) return "";
  return "room " + room + " must not know room " + other;
}

TEST(Layering, DependenciesPointDownOnly) {
  const auto all = all_includes();
  EXPECT_GT(all.size(), 100U) << "no sources found in " << VMM_CSRC;
  for (const Include& include : all) {
    EXPECT_EQ(fault_of(include), "") << include.file << " includes " << include.what;
  }
}

// Whether `file` includes itself, over whatever others; `seen` are those on the way.
bool leads_back(const std::map<std::string, std::vector<std::string>>& includes, const std::string& file,
                const std::string& at, std::set<std::string>& seen) {
  const auto found = includes.find(at);
  if (found == includes.end() || !seen.insert(at).second) return false;
  return std::any_of(found->second.begin(), found->second.end(),
                     [&](const std::string& next) { return next == file || leads_back(includes, file, next, seen); });
}

TEST(Layering, NoHeaderNeedsItself) {
  std::map<std::string, std::vector<std::string>> includes;
  for (const Include& include : all_includes()) {
    if (!include.system && fs::path(include.file).extension() == ".h") includes[include.file].push_back(include.what);
  }
  for (const auto& [file, others] : includes) {
    std::set<std::string> seen;
    EXPECT_FALSE(leads_back(includes, file, file, seen)) << file;
  }
}

TEST(Layering, EveryQuotedIncludeNamesItsLayer) {
  for (const Include& include : all_includes()) {
    if (include.system || layer_of(include.file) == "torch_adapter") continue;
    if (layer_of(include.file) == "bindings" || layer_of(include.file) == "driver") continue;
    EXPECT_GE(layer_rank(layer_of(include.what)), 0) << include.file << " includes \"" << include.what << "\"";
  }
}

// The test itself can fail.
TEST(Layering, SeesEveryKindOfFault) {
  const auto faulty = [](const std::string& file, const std::string& line) {
    std::istringstream text(line);
    const auto found = includes_in(text, file);
    return found.size() == 1 && !fault_of(found[0]).empty();
  };
  EXPECT_TRUE(faulty("base/check.cpp", "#include \"driver/driver.h\""));
  EXPECT_TRUE(faulty("driver/host_driver.h", "#include \"core/pool/pool.h\""));
  EXPECT_TRUE(faulty("core/pool/pool.cpp", "#include <cuda.h>"));
  EXPECT_TRUE(faulty("core/pool/pool.cpp", "#  include <cuda_runtime_api.h>"));
  EXPECT_TRUE(faulty("driver/host_driver.cpp", "#include <cuda.h>"));
  EXPECT_TRUE(faulty("core/pool/pool.cpp", "#include <c10/core/Allocator.h>"));
  EXPECT_TRUE(faulty("driver/cuda_driver.cpp", "#include <torch/torch.h>"));
  EXPECT_TRUE(faulty("core/pool/pool.cpp", "#include \"process/runtime.h\""));
  EXPECT_TRUE(faulty("process/runtime.cpp", "#include \"torch_adapter/cuda_callbacks.h\""));
  EXPECT_TRUE(faulty("process/runtime.cpp", "#include <c10/core/Allocator.h>"));
  EXPECT_TRUE(faulty("torch_adapter/routing.cpp", "#include \"bindings/pool.h\""));
  EXPECT_TRUE(faulty("core/memory/chunk_store.h", "#include \"core/pool/pool.h\""));
  EXPECT_TRUE(faulty("core/limits/budget.cpp", "#include \"core/streams/clock.h\""));
  EXPECT_TRUE(faulty("core/new_room/file.cpp", "#include \"core/numbers/stats.h\""));
  EXPECT_TRUE(faulty("core/options.cpp", "#include \"core/numbers/stats.h\""));
  EXPECT_FALSE(faulty("driver/cuda_driver.cpp", "#include <cuda.h>"));
  EXPECT_TRUE(faulty("core/backing/backing.cpp", "#include \"core/pool/pool.h\""));
  EXPECT_FALSE(faulty("core/device/device_memory.cpp", "#include \"core/pool/pool.h\""));
  EXPECT_FALSE(faulty("bindings/pool.cpp", "#include <pybind11/pybind11.h>"));
}

}  // namespace
}  // namespace vmm::testing

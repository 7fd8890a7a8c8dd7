#include "calls.h"

#include <cctype>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

namespace standin {
namespace {

struct Call {
  std::size_t count = 0;
  std::size_t fails_at = 0;  // 0: never
  CUresult code = CUDA_SUCCESS;
};

struct Book {
  std::mutex mutex;
  std::map<std::string, Call, std::less<>> calls;

  Call& of(std::string_view name) {
    const auto found = calls.find(name);
    return found != calls.end() ? found->second : calls.emplace(std::string(name), Call{}).first->second;
  }
};

Book& book() {
  static auto* const kInstance = new Book;
  return *kInstance;
}

// cuda.h turns names into versions of them: cuMemGetInfo_v2.
std::string_view without_version(std::string_view name) {
  const std::size_t at = name.size() < 3 ? 0 : name.size() - 3;
  const bool versioned = at > 0 && name[at] == '_' && name[at + 1] == 'v' && std::isdigit(name[at + 2]) != 0;
  return versioned ? name.substr(0, at) : name;
}

}  // namespace

CUresult count_call(const char* name) {
  const std::lock_guard<std::mutex> lock(book().mutex);
  Call& call = book().of(without_version(name));
  ++call.count;
  if (call.count != call.fails_at) return CUDA_SUCCESS;
  call.fails_at = 0;
  return call.code;
}

std::size_t calls_of(const char* name) {
  const std::lock_guard<std::mutex> lock(book().mutex);
  return book().of(without_version(name)).count;
}

void fail_call(const char* name, std::size_t nth, CUresult code) {
  const std::lock_guard<std::mutex> lock(book().mutex);
  Call& call = book().of(without_version(name));
  call.fails_at = call.count + nth;
  call.code = code;
}

void fail_no_more() {
  const std::lock_guard<std::mutex> lock(book().mutex);
  for (auto& [name, call] : book().calls) call.fails_at = 0;
}

}  // namespace standin

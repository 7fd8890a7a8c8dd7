#include "ipc/ipc_handle.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/errors.h"

namespace vmm {
namespace {

constexpr int kNewestVersion = 3;
constexpr char kOfCudaMalloc = 'c';
constexpr char kOfOneSize = 'e';
constexpr char kOfSeveralSizes = 'v';
constexpr std::array<char, 8> kSenderFollows = {'t', 'o', 'r', 'c', 'h', 'v', 'm', 'm'};
constexpr std::uint32_t kByDescriptor = 1;
constexpr std::uint32_t kByFabricHandle = 2;
constexpr std::size_t kFabricHandleBytes = 64;

[[noreturn]] void refuse(const std::string& why) {
  throw InvalidArgumentError("these bytes name no memory of another process: " + why);
}

template <typename Value>
void put(std::string& bytes, const Value& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  template <typename Value>
  Value take() {
    Value value{};
    if (left() < sizeof(value)) refuse("they end too early");
    std::memcpy(&value, bytes_.data() + at_, sizeof(value));
    at_ += sizeof(value);
    return value;
  }
  [[nodiscard]] std::size_t left() const { return bytes_.size() - at_; }
  std::string take_bytes(std::size_t count) {
    if (left() < count) refuse("they end too early");
    at_ += count;
    return bytes_.substr(at_ - count, count);
  }

 private:
  const std::string& bytes_;
  std::size_t at_ = 0;
};

// As torch's compiler lays its header out: the process id takes eight bytes.
void put_process(std::string& bytes, pid_t pid) {
  put(bytes, static_cast<std::int32_t>(pid));
  put(bytes, std::uint32_t{0});
}
pid_t take_process(Reader& reader) {
  const auto pid = reader.take<std::int32_t>();
  (void)reader.take<std::uint32_t>();  // torch leaves anything there
  return pid;
}

// `bytes_each` each: more than the handle holds would be a wild allocation.
std::vector<SharedChunk> make_chunks(const Reader& reader, std::uint64_t count, std::size_t bytes_each) {
  if (count == 0) refuse("they list no chunk");
  if (count > reader.left() / bytes_each) refuse("they end too early");
  return std::vector<SharedChunk>(count);
}

void put_sender(std::string& bytes, const IpcHandle& handle) {
  put(bytes, kSenderFollows);
  put(bytes, handle.sender->started);
  put(bytes, handle.sender->socket);
  put(bytes, handle.sender->password);
  for (const SharedChunk& chunk : handle.chunks) put(bytes, chunk.id);
}
void take_sender(Reader& reader, IpcHandle* handle) {
  if (reader.left() < sizeof(kSenderFollows)) return;
  if (reader.take<std::array<char, 8>>() != kSenderFollows) return;
  IpcSender sender;
  sender.started = reader.take<std::uint64_t>();
  sender.socket = reader.take<decltype(sender.socket)>();
  sender.password = reader.take<decltype(sender.password)>();
  for (SharedChunk& chunk : handle->chunks) chunk.id = reader.take<std::uint64_t>();
  handle->sender = sender;
}

void take_chunks_of_one_size(Reader& reader, int version, IpcHandle* handle) {
  handle->pid = take_process(reader);
  const auto size = reader.take<std::uint64_t>();
  const auto count = reader.take<std::uint64_t>();
  // Up to version 2 only the length tells.
  std::uint32_t named_by = kByDescriptor;
  if (version >= 3) {
    named_by = reader.take<std::uint32_t>();
    (void)reader.take<std::uint32_t>();
  } else if (count != 0 && count <= reader.left() / kFabricHandleBytes && count * kFabricHandleBytes == reader.left()) {
    named_by = kByFabricHandle;
  }
  if (named_by == kByFabricHandle) {
    throw NotAvailableError(
        "the sender shares its memory by fabric handles, which torch_vmm does not open; in the sender use torch_vmm, "
        "or torch's allocator without expandable_segments");
  }
  if (size == 0) refuse("their chunks have no size");
  handle->chunks = make_chunks(reader, count, sizeof(std::int32_t));
  for (SharedChunk& chunk : handle->chunks) chunk.size = size;
}

void take_chunks_of_several_sizes(Reader& reader, IpcHandle* handle) {
  handle->pid = take_process(reader);
  const auto count = reader.take<std::uint64_t>();
  handle->chunks = make_chunks(reader, count, sizeof(std::uint64_t) + sizeof(std::int32_t));
  for (SharedChunk& chunk : handle->chunks) {
    chunk.size = reader.take<std::uint64_t>();
    if (chunk.size == 0) refuse("a chunk of theirs has no size");
  }
}

}  // namespace

std::string encode(const IpcHandle& handle, int version) {
  if (!handle.cuda_ipc.empty()) {
    std::string bytes;
    put(bytes, static_cast<char>(version));
    put(bytes, kOfCudaMalloc);
    return bytes + handle.cuda_ipc;
  }
  VMM_CHECK(!handle.chunks.empty() && handle.sender.has_value(), "chunks ", handle.chunks.size());
  const std::size_t size = handle.chunks.front().size;
  const bool one_size = std::all_of(handle.chunks.begin(), handle.chunks.end(),
                                    [size](const SharedChunk& chunk) { return chunk.size == size; });
  std::string bytes;
  put(bytes, static_cast<char>(version));
  put(bytes, one_size ? kOfOneSize : kOfSeveralSizes);
  put_process(bytes, handle.pid);
  if (one_size) put(bytes, std::uint64_t{size});
  put(bytes, std::uint64_t{handle.chunks.size()});
  if (one_size && version >= 3) {
    put(bytes, kByDescriptor);
    put(bytes, std::uint32_t{0});
  }
  if (!one_size) {
    for (const SharedChunk& chunk : handle.chunks) put(bytes, std::uint64_t{chunk.size});
  }
  for (const SharedChunk& chunk : handle.chunks) put(bytes, static_cast<std::int32_t>(chunk.fd));
  put_sender(bytes, handle);
  return bytes;
}

IpcHandle decode(const std::string& bytes) {
  IpcHandle handle;
  // Before torch's handles had a version they were CUDA's own.
  if (bytes.size() == kCudaIpcHandleBytes) {
    handle.cuda_ipc = bytes;
    return handle;
  }
  Reader reader(bytes);
  const int version = reader.take<std::uint8_t>();
  if (version > kNewestVersion) {
    refuse("their version is " + std::to_string(version) + ", of a newer torch; this one knows " +
           std::to_string(kNewestVersion));
  }
  switch (const char form = reader.take<char>(); form) {
    case kOfCudaMalloc:
      handle.cuda_ipc = reader.take_bytes(kCudaIpcHandleBytes);
      return handle;
    case kOfOneSize:
      take_chunks_of_one_size(reader, version, &handle);
      break;
    case kOfSeveralSizes:
      take_chunks_of_several_sizes(reader, &handle);
      break;
    default:
      refuse("their form is " + std::to_string(static_cast<int>(form)));
  }
  for (SharedChunk& chunk : handle.chunks) chunk.fd = reader.take<std::int32_t>();
  take_sender(reader, &handle);
  return handle;
}

}  // namespace vmm

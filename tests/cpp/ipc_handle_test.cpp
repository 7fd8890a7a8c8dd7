#include "ipc/ipc_handle.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "base/errors.h"
#include "base/units.h"

namespace vmm::testing {
namespace {

IpcHandle of_chunks(std::initializer_list<std::size_t> sizes) {
  IpcHandle handle;
  handle.pid = 4711;
  for (const std::size_t size : sizes) {
    const auto k = static_cast<int>(handle.chunks.size());
    handle.chunks.push_back({size, 40 + k, 900U + static_cast<unsigned>(k)});
  }
  IpcSender sender;
  sender.started = 123456;
  sender.socket.fill(0xAB);
  sender.password.fill(0xCD);
  handle.sender = sender;
  return handle;
}

// What torch's C++ writes: the object representation of its header.
struct HeaderOfVersion2 {
  std::int32_t pid;
  std::size_t segment_size;
  std::size_t num_handles;
};
struct HeaderOfVersion3 {
  std::int32_t pid;
  std::size_t segment_size;
  std::size_t num_handles;
  std::int32_t handle_type;
};
template <typename Header>
std::string as_torch(char version, const Header& header, const std::string& names) {
  return std::string{version, 'e'} + std::string(reinterpret_cast<const char*>(&header), sizeof(header)) + names;
}
std::string numbers(std::initializer_list<std::int32_t> values) {
  std::string bytes;
  for (const std::int32_t value : values) bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
  return bytes;
}
// gcc leaves padding as it was.
template <typename Header>
Header zeroed() {
  Header header;
  std::memset(&header, 0, sizeof(header));
  return header;
}

void expect_same_chunks(const IpcHandle& a, const IpcHandle& b) {
  EXPECT_EQ(a.pid, b.pid);
  ASSERT_EQ(a.chunks.size(), b.chunks.size());
  for (std::size_t k = 0; k < a.chunks.size(); ++k) {
    EXPECT_EQ(a.chunks[k].size, b.chunks[k].size) << k;
    EXPECT_EQ(a.chunks[k].fd, b.chunks[k].fd) << k;
    EXPECT_EQ(a.chunks[k].id, b.chunks[k].id) << k;
  }
}

TEST(IpcHandle, ChunksOfOneSizeBeginAsTorchWritesThem) {
  auto old = zeroed<HeaderOfVersion2>();
  old.pid = 4711;
  old.segment_size = 2 * kMiB;
  old.num_handles = 2;
  const std::string before = as_torch(2, old, numbers({40, 41}));
  EXPECT_EQ(encode(of_chunks({2 * kMiB, 2 * kMiB}), 2).substr(0, before.size()), before);

  auto now = zeroed<HeaderOfVersion3>();
  now.pid = 4711;
  now.segment_size = 2 * kMiB;
  now.num_handles = 2;
  now.handle_type = 1;  // Expandable_Segments_Handle_Type::POSIX_FD
  const std::string since = as_torch(3, now, numbers({40, 41}));
  EXPECT_EQ(encode(of_chunks({2 * kMiB, 2 * kMiB}), 3).substr(0, since.size()), since);
}

TEST(IpcHandle, ComesBackAsItWas) {
  for (const int version : {2, 3}) {
    for (const auto& handle : {of_chunks({2 * kMiB}), of_chunks({kGiB, kGiB, kGiB}), of_chunks({4 * kMiB, 2 * kMiB})}) {
      const std::string bytes = encode(handle, version);
      const IpcHandle back = decode(bytes);
      expect_same_chunks(back, handle);
      EXPECT_TRUE(back.cuda_ipc.empty());
      ASSERT_TRUE(back.sender.has_value());
      EXPECT_EQ(back.sender->started, handle.sender->started);
      EXPECT_EQ(back.sender->socket, handle.sender->socket);
      EXPECT_EQ(back.sender->password, handle.sender->password);
      EXPECT_EQ(encode(back, version), bytes);
      EXPECT_NE(bytes.size(), kCudaIpcHandleBytes) << "torch would take it for a bare handle of CUDA's";
    }
  }
}

TEST(IpcHandle, ChunksOfSeveralSizesHaveAFormThatTorchRefuses) {
  EXPECT_EQ(encode(of_chunks({2 * kMiB, 2 * kMiB}), 2)[1], 'e');
  const std::string bytes = encode(of_chunks({4 * kMiB, 2 * kMiB}), 2);
  EXPECT_EQ(bytes[0], 2) << "torch looks at the version first";
  EXPECT_EQ(bytes[1], 'v');
}

TEST(IpcHandle, ReadsTorchsOwn) {
  auto old = zeroed<HeaderOfVersion2>();
  old.pid = 17;
  old.segment_size = 20 * kMiB;
  old.num_handles = 3;
  auto now = zeroed<HeaderOfVersion3>();
  now.pid = 17;
  now.segment_size = 20 * kMiB;
  now.num_handles = 3;
  now.handle_type = 1;
  IpcHandle expected;
  expected.pid = 17;
  expected.chunks = {{20 * kMiB, 7, 0}, {20 * kMiB, 9, 0}, {20 * kMiB, 8, 0}};
  for (const std::string& bytes : {as_torch(2, old, numbers({7, 9, 8})), as_torch(1, old, numbers({7, 9, 8})),
                                   as_torch(3, now, numbers({7, 9, 8}))}) {
    const IpcHandle handle = decode(bytes);
    expect_same_chunks(handle, expected);
    EXPECT_FALSE(handle.sender.has_value());
  }
}

TEST(IpcHandle, ReadsAndWritesHandlesOfCudaMalloc) {
  std::string cuda(kCudaIpcHandleBytes, '\0');
  for (std::size_t k = 0; k < cuda.size(); ++k) cuda[k] = static_cast<char>(k * 3);
  for (const std::string& bytes : {cuda, std::string{2, 'c'} + cuda, std::string{3, 'c'} + cuda}) {
    const IpcHandle handle = decode(bytes);
    EXPECT_EQ(handle.cuda_ipc, cuda);
    EXPECT_TRUE(handle.chunks.empty());
  }
  IpcHandle of_provider;
  of_provider.cuda_ipc = cuda;
  EXPECT_EQ(encode(of_provider, 2), (std::string{2, 'c'} + cuda));
  EXPECT_EQ(encode(of_provider, 3), (std::string{3, 'c'} + cuda));
}

TEST(IpcHandle, NamesFabricHandles) {
  const std::string fabric(2 * kCudaIpcHandleBytes, 'f');
  auto old = zeroed<HeaderOfVersion2>();
  old.segment_size = 2 * kMiB;
  old.num_handles = 2;
  EXPECT_THROW(decode(as_torch(2, old, fabric)), NotAvailableError);
  auto now = zeroed<HeaderOfVersion3>();
  now.segment_size = 2 * kMiB;
  now.num_handles = 2;
  now.handle_type = 2;
  try {
    decode(as_torch(3, now, fabric));
    FAIL();
  } catch (const NotAvailableError& error) {
    EXPECT_NE(std::string(error.what()).find("fabric"), std::string::npos) << error.what();
  }
}

TEST(IpcHandle, RefusesWhatIsNone) {
  EXPECT_THROW(decode(""), InvalidArgumentError);
  EXPECT_THROW(decode(std::string{2, 'x'} + std::string(100, '\0')), InvalidArgumentError);
  EXPECT_THROW(decode(std::string{9, 'c'} + std::string(64, '\0')), InvalidArgumentError) << "of a newer torch";
  // More chunks than there are bytes: no wild allocation.
  for (const std::size_t count : {std::size_t{0}, std::size_t{3}, std::size_t{1} << 40, ~std::size_t{0}}) {
    auto header = zeroed<HeaderOfVersion2>();
    header.segment_size = 2 * kMiB;
    header.num_handles = count;
    EXPECT_THROW(decode(as_torch(2, header, numbers({1, 2}))), InvalidArgumentError) << count;
  }
  auto empty = zeroed<HeaderOfVersion2>();
  empty.num_handles = 1;
  EXPECT_THROW(decode(as_torch(2, empty, numbers({1}))), InvalidArgumentError) << "chunks of no size";
}

TEST(IpcHandle, EveryCutIsRefusedOrLacksTheSender) {
  for (const auto& handle : {of_chunks({2 * kMiB, 2 * kMiB}), of_chunks({4 * kMiB, 2 * kMiB})}) {
    const std::string bytes = encode(handle, 3);
    for (std::size_t length = 0; length < bytes.size(); ++length) {
      if (length == kCudaIpcHandleBytes) continue;
      try {
        EXPECT_FALSE(decode(bytes.substr(0, length)).sender.has_value()) << length;
      } catch (const InvalidArgumentError&) {
      }
    }
  }
}

}  // namespace
}  // namespace vmm::testing

#include "core/memory/file_backup.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>

#include "base/errors.h"
#include "base/function_ref.h"

namespace vmm {

namespace {

// The file begins with this page, so that nobody's other file is ever taken for one of ours.
constexpr std::size_t kHeadBytes = 4 * kKiB;
constexpr std::array<char, 24> kMagic = {"torch_vmm backup 1\n"};

// CRC-32C (Castagnoli), eight bytes at a time by eight tables: 2 GB/s, twice the disk.
class Crc32c {
 public:
  Crc32c() {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      std::uint32_t value = byte;
      for (int bit = 0; bit < 8; ++bit) value = (value >> 1U) ^ ((value & 1U) != 0 ? 0x82F63B78U : 0U);
      tables_[0][byte] = value;
    }
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      for (std::size_t k = 1; k < tables_.size(); ++k) {
        const std::uint32_t before = tables_[k - 1][byte];
        tables_[k][byte] = (before >> 8U) ^ tables_[0][before & 0xFFU];
      }
    }
  }
  // `size`: a multiple of 8.
  [[nodiscard]] std::uint32_t of(const std::byte* bytes, std::size_t size) const {
    std::uint32_t value = ~0U;
    for (std::size_t at = 0; at < size; at += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes + at, sizeof(word));
      word ^= value;
      value = 0;
      for (std::size_t k = 0; k < 8; ++k) value ^= tables_[7 - k][(word >> (8 * k)) & 0xFFU];
    }
    return ~value;
  }

 private:
  std::array<std::array<std::uint32_t, 256>, 8> tables_{};
};

std::uint32_t checksum(const std::byte* bytes, std::size_t size) {
  static const Crc32c crc;
  return crc.of(bytes, size);
}

bool is_folder(const std::string& path) {
  struct stat found {};
  return ::stat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode);
}

// No other's: containers that share a folder may have processes of one number.
std::string named_in(const std::string& folder) {
  static std::atomic<unsigned> number{0};
  std::array<char, 17> random{};
  std::random_device bits;
  std::snprintf(random.data(), random.size(), "%08x%08x", bits(), bits());
  return folder + "/torch_vmm-" + std::to_string(::getpid()) + "-" + random.data() + "-" + std::to_string(++number) +
         ".sleep";
}

// Nobody else has it.
bool has_locked(const OwnFile& file) { return ::flock(file.descriptor(), LOCK_EX | LOCK_NB) == 0; }

bool is_ours(const OwnFile& file, std::byte* page) {
  return ::pread(file.descriptor(), page, kHeadBytes, 0) > 0 && std::memcmp(page, kMagic.data(), kMagic.size()) == 0;
}

bool is_chosen_name(const std::string& name) { return name.starts_with("torch_vmm-") && name.ends_with(".sleep"); }

// FileBackup::beside() of a file of that name.
bool is_beside(const std::string& name, const std::string& first) {
  return name.starts_with(first + '.') && name.find_first_not_of("0123456789", first.size() + 1) == std::string::npos;
}

// What processes that have ended left behind in a folder: each as large as a model.
void remove_left_in(const std::filesystem::path& folder, const FunctionRef<bool(const std::string&)>& is_looked_at) {
  try {
    // That which asks for no error code: the other ends the process where memory lacks.
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (!is_looked_at(entry.path().filename().string())) continue;
      OwnFile file;
      if (!file.open(entry.path().string(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK))
        continue;  // a pipe would wait for a writer
      alignas(std::max_align_t) std::array<std::byte, kHeadBytes> page{};
      if (has_locked(file) && is_ours(file, page.data())) file.unlink(entry.path().string());
    }
  } catch (const std::filesystem::filesystem_error&) {
    // It cannot be read, or its path is none: whoever makes the file says so.
  }
}

// Again where a signal came: the call's answer, or a negative one and errno.
template <typename Call>
auto through_signals(const Call& call) {
  auto answer = call();
  while (answer < 0 && errno == EINTR) answer = call();
  return answer;
}

// posix_fallocate(), whatever signals come: in steps, as some file systems undo all that an
// interrupted call had. 0, or what is wrong.
int allocate(int file, std::size_t bytes) {
  constexpr std::size_t kStep = 256 * kMiB;
  for (std::size_t at = 0; at < bytes;) {
    const std::size_t size = std::min(kStep, bytes - at);
    const int error = ::posix_fallocate(file, static_cast<off_t>(at), static_cast<off_t>(size));
    if (error == EINTR) continue;
    if (error != 0) return error;
    at += size;
  }
  return 0;
}

// 0, or what is wrong.
int write_mark(int file, std::byte* page) {
  std::memcpy(page, kMagic.data(), kMagic.size());
  const ssize_t written = through_signals([&] { return ::pwrite(file, page, kHeadBytes, 0); });
  if (written == static_cast<ssize_t>(kHeadBytes)) return 0;
  return written < 0 ? errno : EIO;
}

std::size_t file_offset(std::size_t slab) { return kHeadBytes + slab * PinnedMemory::kSlabBytes; }

}  // namespace

std::string FileBackup::beside(const std::string& path, int number) { return path + '.' + std::to_string(number); }

void FileBackup::fail(const std::string& doing, int error) const {
  throw VmmError(doing + " " + path_ + ": " + std::strerror(error));
}

FileBackup::FileBackup(Driver& driver, const std::string& path, std::size_t bytes)
    : driver_(driver),
      path_(is_folder(path) ? named_in(path) : path),
      process_(::getpid()),
      stage_(std::make_unique<Stage>(driver)) {
  std::byte* const page = stage_->memory.begin();
  const std::size_t slabs = (bytes + kSlabBytes - 1) / kSlabBytes;
  checksums_.resize(slabs);
  if (path_ != path) {
    remove_left_in(path, [](const std::string& other) { return is_chosen_name(other); });
  } else {
    const std::filesystem::path named(path_);
    const std::string name = named.filename().string();
    remove_left_in(named.parent_path(), [&name](const std::string& other) { return is_beside(other, name); });
  }
  open(page);
  const std::size_t room = file_offset(0) + align_up(bytes, kHeadBytes);
  const int file = file_.descriptor();
  // The mark first: a process that is killed while it takes the room leaves what the next takes over.
  int error = through_signals([file] { return ::ftruncate(file, kHeadBytes); }) != 0 ? errno : write_mark(file, page);
  if (error == 0) error = allocate(file, room);
  if (error == 0) return;
  file_.unlink(path_);
  fail("no room for a model's " + format_bytes(bytes) + " in", error);
}

// A new one that nobody has seen without its mark and its lock. False: it is there, or this file
// system makes none without a name (tmpfs, ext4 and xfs do).
bool FileBackup::make_marked(int direct, std::byte* page) {
  const std::filesystem::path folder = std::filesystem::path(path_).parent_path();
  const std::string in = folder.empty() ? "." : folder.string();
  if (!file_.open(in, O_RDWR | O_TMPFILE | direct, S_IRUSR | S_IWUSR)) return false;
  const std::string unnamed = "/proc/self/fd/" + std::to_string(file_.descriptor());
  if (has_locked(file_) && write_mark(file_.descriptor(), page) == 0 &&
      ::linkat(AT_FDCWD, unnamed.c_str(), AT_FDCWD, path_.c_str(), AT_SYMLINK_FOLLOW) == 0) {
    return true;
  }
  file_.close();
  return false;
}

// One of a process that has ended carries our mark and no lock. `page`: to read it to.
void FileBackup::open(std::byte* page) {
  for (const int direct : {O_DIRECT, 0}) {
    if (make_marked(direct, page)) return;
    if (!file_.open(path_, O_RDWR | O_CREAT | O_EXCL | direct, S_IRUSR | S_IWUSR) && errno == EEXIST) {
      const bool is_there = file_.open(path_, O_RDWR | O_NOFOLLOW | direct);
      const int error = is_there ? 0 : errno;
      const bool is_free = is_there && has_locked(file_);
      if (is_free && is_ours(file_, page)) return;
      if (error != EINVAL) {
        const std::string why = is_free          ? "is no backup of a model"
                                : is_there       ? "is in use"
                                : error == ELOOP ? "is a symbolic link"
                                                 : std::string("cannot be opened (") + std::strerror(error) + ")";
        throw InvalidArgumentError("the file " + path_ + " exists, and " + why +
                                   ": name one that does not, or a folder");
      }
      continue;
    }
    if (file_.is_open()) {
      // Whoever looks whether it is somebody's has the lock for a moment.
      const int locked = through_signals([this] { return ::flock(file_.descriptor(), LOCK_EX); });
      if (locked != 0) {
        const int error = errno;
        file_.unlink(path_);  // it has no mark by which anybody would know it for one of ours
        fail("cannot lock the file", error);
      }
      return;
    }
    if (errno != EINVAL) break;  // this file system has no direct I/O: once more without
    ::unlink(path_.c_str());     // which may have made it all the same
  }
  fail("cannot make the file", errno);
}

FileBackup::~FileBackup() { forget_name(); }

void FileBackup::forget_name() noexcept {
  if (::getpid() == process_) file_.unlink(path_);  // not in a child of a fork
}

FileBackup::Stage::Stage(Driver& driver) : memory(driver, pages.begin()) {
  memory.touch(0, kSlabBytes);
  memory.pin();
}

void FileBackup::Stage::await_copies() {
  if (copied_by.device == nullptr) return;
  StreamPoint copies({copied_by});
  throw_if_failed(copies.wait(), "waiting for copies");
  copied_by = {};
}

std::size_t FileBackup::size_of(std::size_t index) const {
  return align_up(std::min(kSlabBytes, end_ - index * kSlabBytes), kHeadBytes);
}

void FileBackup::write_slab() {
  if (stage_ == nullptr || stage_->is_written) return;
  stage_->await_copies();
  const std::size_t slab = stage_->slab;
  const std::size_t size = size_of(slab);
  const std::byte* const from = stage_->memory.begin();
  checksums_[slab] = checksum(from, size);
  for (std::size_t done = 0; done < size;) {
    const auto at = static_cast<off_t>(file_offset(slab) + done);
    const ssize_t written = through_signals([&] { return ::pwrite(file_.descriptor(), from + done, size - done, at); });
    if (written <= 0) fail("writing a model's memory to", written < 0 ? errno : ENOSPC);
    done += static_cast<std::size_t>(written);
  }
  stage_->is_written = true;
}

FileBackup::Stage& FileBackup::staged(std::size_t index) {
  for (const StagePtr* stage : {&unwritten_, &stage_}) {
    if (*stage != nullptr && (*stage)->slab == index) return **stage;
  }
  try {
    write_slab();
  } catch (const VmmError&) {
    // Nobody needs it in the file where all of it is to come back.
    unwritten_ = std::move(stage_);
  }
  if (stage_ == nullptr) stage_ = std::make_unique<Stage>(driver_);
  stage_->await_copies();
  stage_->slab = kNoSlab;
  std::byte* const to = stage_->memory.begin();
  const std::size_t size = size_of(index);
  for (std::size_t done = 0; done < size;) {
    const auto at = static_cast<off_t>(file_offset(index) + done);
    const ssize_t got = through_signals([&] { return ::pread(file_.descriptor(), to + done, size - done, at); });
    if (got <= 0) fail("reading a model's memory from", got < 0 ? errno : EIO);
    done += static_cast<std::size_t>(got);
  }
  if (checksum(to, size) != checksums_[index]) {
    throw VmmError("the " + format_bytes(size) + " at " + std::to_string(file_offset(index)) + " of " + path_ +
                   " are not what was written there: the checksum differs");
  }
  stage_->slab = index;
  return *stage_;
}

void FileBackup::save(std::size_t at, Address from, std::size_t size, const StreamUse& by) {
  const MutexLock lock(mutex_);
  for (std::size_t done = 0; done < size;) {
    const std::size_t index = (at + done) / kSlabBytes;
    const std::size_t within = (at + done) % kSlabBytes;
    const std::size_t piece = std::min(size - done, kSlabBytes - within);
    if (stage_->slab != index) {
      write_slab();
      stage_->slab = index;
    }
    stage_->is_written = false;
    stage_->copied_by = by;
    throw_if_failed(
        driver_.copy_async(by.device->device(), stage_->memory.address() + within, from + done, piece, by.stream),
        "saving a model in " + path_);
    done += piece;
    end_ = std::max(end_, at + done);
  }
}

void FileBackup::finish() {
  const MutexLock lock(mutex_);
  write_slab();
  stage_.reset();
}

void FileBackup::load(std::size_t at, Address to, std::size_t size, const StreamUse& by) {
  const MutexLock lock(mutex_);
  for (std::size_t done = 0; done < size;) {
    const std::size_t within = (at + done) % kSlabBytes;
    const std::size_t piece = std::min(size - done, kSlabBytes - within);
    Stage& from = staged((at + done) / kSlabBytes);
    from.copied_by = by;
    throw_if_failed(
        driver_.copy_async(by.device->device(), to + done, from.memory.address() + within, piece, by.stream),
        "loading a model from " + path_);
    done += piece;
  }
}

void FileBackup::rest() noexcept {
  const MutexLock lock(mutex_);
  if (stage_ == nullptr || !stage_->is_written) return;
  try {
    stage_->await_copies();  // another part's
    stage_.reset();
  } catch (...) {
    // It is there for whoever loads next.
  }
}

void FileBackup::read(std::size_t at, std::byte* to, std::size_t size) {
  const MutexLock lock(mutex_);
  const bool is_awaited = stage_ != nullptr;  // by who loads
  try {
    read_staged(at, to, size);
  } catch (...) {
    if (!is_awaited) stage_.reset();
    throw;
  }
  if (!is_awaited) stage_.reset();
}

void FileBackup::read_staged(std::size_t at, std::byte* to, std::size_t size) {
  for (std::size_t done = 0; done < size;) {
    const std::size_t within = (at + done) % kSlabBytes;
    const std::size_t piece = std::min(size - done, kSlabBytes - within);
    Stage& from = staged((at + done) / kSlabBytes);
    from.await_copies();
    std::memcpy(to + done, from.memory.begin() + within, piece);
    done += piece;
  }
}

}  // namespace vmm

#include "ipc/ipc_descriptors.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/errors.h"

namespace vmm {
namespace {

// By number: older headers lack the names, the kernel may know them all the same.
constexpr long kPidfdOpen = 434;
constexpr long kPidfdGetfd = 438;

// How many descriptors one message carries; the kernel's own limit is 253.
constexpr std::size_t kMostInMessage = 128;
constexpr int kBacklog = 128;
// A peer that does not answer within this time is given up.
constexpr timeval kPatienceOfClient = {10, 0};
// Less: one that has stopped holds up the others, and they are to have their turn in time.
constexpr timeval kPatienceOfServer = {2, 0};

// A request, whole in one message; the answer is a Reply with the descriptors.
struct Request {
  std::array<std::uint8_t, 16> password;
  std::uint64_t count;
  std::array<std::uint64_t, kMostInMessage> ids;
};
struct Reply {
  std::uint64_t count;  // 0: refused
};

std::string error_text(int error) { return std::generic_category().message(error); }

std::string who(const IpcHandle& handle) { return "process " + std::to_string(handle.pid); }

struct SocketName {
  sockaddr_un address{};
  socklen_t length = 0;
};

// An abstract name: no file is left behind, and it ends with the socket.
SocketName name_of(pid_t pid, const IpcSender& sender) {
  std::string text = "torch_vmm." + std::to_string(pid) + ".";
  for (const std::uint8_t byte : sender.socket) {
    std::array<char, 3> digits{};
    (void)std::snprintf(digits.data(), digits.size(), "%02x", byte);
    text += digits.data();
  }
  SocketName name;
  name.address.sun_family = AF_UNIX;
  std::memcpy(name.address.sun_path + 1, text.data(), text.size());
  name.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  return name;
}

void limit_patience(const Descriptor& socket, const timeval& patience) {
  (void)::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  (void)::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
}

// Again where a signal came, as sockets with a limit to their patience do not go on by themselves;
// but each time they have all of it anew, so not beyond one such time in all.
template <typename Call>
auto through_signals(const Call& call) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(kPatienceOfClient.tv_sec);
  auto answer = call();
  while (answer < 0 && errno == EINTR && std::chrono::steady_clock::now() < end) answer = call();
  return answer;
}

// The other end is a process of this user's, or of root's.
bool peer_is_friend(const Descriptor& socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return false;
  return peer.uid == ::geteuid() || peer.uid == 0;
}

template <typename Bytes>
bool fill_at_random(Bytes& bytes) {
  return ::getrandom(bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size());
}

union ControlBuffer {
  cmsghdr aligned;
  std::array<char, CMSG_SPACE(sizeof(int) * kMostInMessage)> bytes;
};

bool send_reply(const Descriptor& socket, const Descriptors& descriptors) {
  Reply reply{descriptors.size()};
  iovec content{&reply, sizeof(reply)};
  ControlBuffer control{};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    std::array<int, kMostInMessage> numbers{};
    for (std::size_t k = 0; k < descriptors.size(); ++k) numbers.at(k) = descriptors[k].get();
    const std::size_t bytes = sizeof(int) * descriptors.size();
    message.msg_control = control.bytes.data();
    message.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(header), numbers.data(), bytes);
  }
  const ssize_t sent = through_signals([&] { return ::sendmsg(socket.get(), &message, MSG_NOSIGNAL); });
  return sent == static_cast<ssize_t>(sizeof(reply));
}

// Adds what one reply carries to `out`; false: refused, cut off or too late.
bool receive_reply(const Descriptor& socket, std::size_t expected, Descriptors* out) {
  Reply reply{};
  iovec content{&reply, sizeof(reply)};
  ControlBuffer control{};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes.data();
  message.msg_controllen = sizeof(control.bytes);
  const ssize_t got = through_signals([&] { return ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC); });
  if (got < 0) return false;
  std::size_t received = 0;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t k = 0; k < count; ++k) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + k * sizeof(int), sizeof(fd));
      out->emplace_back(fd);
      ++received;
    }
  }
  return got == static_cast<ssize_t>(sizeof(reply)) && (message.msg_flags & MSG_CTRUNC) == 0 &&
         reply.count == expected && received == expected;
}

std::string why_not_traced(const IpcHandle& handle, int error) {
  switch (error) {
    case EPERM:
      return "this process may not take descriptors out of " + who(handle) +
             " (pidfd_getfd: EPERM): allow it with --cap-add=SYS_PTRACE for a container, or with the sysctl "
             "kernel.yama.ptrace_scope=0";
    case ENOSYS:
      return "this kernel has no pidfd_getfd; Linux 5.6 and newer have it";
    case EBADF:
      return who(handle) + " has closed the descriptor (pidfd_getfd: EBADF): it has freed the memory";
    case ESRCH:
      return "there is no " + who(handle) + " here: it has ended, or runs in another process namespace";
    case EMFILE:
    case ENFILE:
      return "no more descriptors can be opened here: raise ulimit -n";
    default:
      return "descriptors cannot be taken out of " + who(handle) + ": " + error_text(error);
  }
}

}  // namespace

// -- Descriptor.

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.release();
  }
  return *this;
}

int Descriptor::release() { return std::exchange(fd_, -1); }

void Descriptor::close() {
  if (fd_ >= 0) ::close(release());
}

std::uint64_t start_of_process(pid_t pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.is_open()) return 0;
  std::array<char, 1024> text{};
  if (::read(file.get(), text.data(), text.size() - 1) <= 0) return 0;
  // "pid (name) state ..": the name may hold anything, also parentheses; the
  // start is the 20th field after it.
  const char* at = std::strrchr(text.data(), ')');
  for (int field = 0; at != nullptr && field < 20; ++field) at = std::strchr(at + 1, ' ');
  return at == nullptr ? 0 : std::strtoull(at, nullptr, 10);
}

// -- The sender.

DescriptorServer::DescriptorServer() {
  sender_.started = start_of_process(::getpid());
  // Without a password nobody could ask; without either, handles are no less
  // unique among processes that live at one time.
  if (fill_at_random(sender_.socket) && fill_at_random(sender_.password) && listen()) {
    stop_ = Descriptor(::eventfd(0, EFD_CLOEXEC));
    // Signals are for the threads that know them.
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      if (stop_.is_open()) thread_ = std::make_unique<std::thread>([this] { serve(); });
    } catch (const std::system_error&) {
      socket_.close();
    }
    (void)pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  watch_forks(this);
}

DescriptorServer::~DescriptorServer() {
  unwatch_forks(this);
  if (thread_ == nullptr) return;
  (void)::eventfd_write(stop_.get(), 1);
  thread_->join();
}

bool DescriptorServer::listen() {
  socket_ = Descriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const SocketName name = name_of(::getpid(), sender_);
  if (socket_.is_open() && ::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&name.address), name.length) == 0 &&
      ::listen(socket_.get(), kBacklog) == 0) {
    return true;
  }
  socket_.close();
  return false;
}

std::uint64_t DescriptorServer::add(Descriptor fd) {
  // A program that is started from here shall not keep the memory.
  (void)::fcntl(fd.get(), F_SETFD, FD_CLOEXEC);
  const MutexLock lock(mutex_);
  open_.emplace(next_id_, std::move(fd));
  return next_id_++;
}

void DescriptorServer::remove(std::uint64_t id) {
  Descriptor closing;
  const MutexLock lock(mutex_);
  const auto found = open_.find(id);
  if (found == open_.end()) return;
  closing = std::move(found->second);
  open_.erase(found);
}

std::size_t DescriptorServer::size() const {
  const MutexLock lock(mutex_);
  return open_.size();
}

void DescriptorServer::after_fork_in_child() {
  for (auto& [id, descriptor] : open_) descriptor.close();
  socket_.close();
  stop_.close();
  // The thread stayed in the parent, and nothing here may end or join it.
  (void)thread_.release();  // NOLINT(bugprone-unused-return-value): it is never deleted
  mutex_.unlock();
}

void DescriptorServer::serve() {
  (void)::pthread_setname_np(::pthread_self(), "torch_vmm-ipc");
  const int socket = socket_.get();
  std::array<pollfd, 2> waiting = {pollfd{socket, POLLIN, 0}, pollfd{stop_.get(), POLLIN, 0}};
  for (;;) {
    if (::poll(waiting.data(), waiting.size(), -1) < 0 && errno != EINTR) return;
    if (waiting[1].revents != 0) return;
    if (waiting[0].revents == 0) continue;
    const Descriptor client(::accept4(socket, nullptr, nullptr, SOCK_CLOEXEC));
    if (client.is_open()) {
      answer(client);
    } else if (errno == EMFILE || errno == ENFILE) {
      // The client stays in the queue: do not spin on it.
      (void)::poll(nullptr, 0, 100);
    }
  }
}

void DescriptorServer::answer(const Descriptor& client) {
  if (!peer_is_friend(client)) return;
  limit_patience(client, kPatienceOfServer);
  for (;;) {
    Request request{};
    const ssize_t got = through_signals([&] { return ::recv(client.get(), &request, sizeof(request), 0); });
    if (got != static_cast<ssize_t>(sizeof(request))) return;
    if (request.password != sender_.password || request.count == 0 || request.count > kMostInMessage) return;
    // Copies, so that none is closed and its number used again while it is sent.
    Descriptors copies;
    {
      const MutexLock lock(mutex_);
      for (std::size_t k = 0; k < request.count; ++k) {
        const auto found = open_.find(request.ids.at(k));
        if (found == open_.end()) break;
        copies.emplace_back(::fcntl(found->second.get(), F_DUPFD_CLOEXEC, 0));
        if (!copies.back().is_open()) break;
      }
    }
    if (copies.size() != request.count || !copies.back().is_open()) copies.clear();
    if (!send_reply(client, copies) || copies.empty()) return;
  }
}

// -- The receiver.

std::string take_from_process(const IpcHandle& handle, Descriptors* out) {
  if (handle.sender.has_value() && handle.sender->started != 0) {
    const std::uint64_t started = start_of_process(handle.pid);
    if (started != 0 && started != handle.sender->started) {
      return "the process that has the number " + std::to_string(handle.pid) +
             " here is another one: the sender has ended, or runs in another process namespace";
    }
  }
  const Descriptor process(static_cast<int>(::syscall(kPidfdOpen, handle.pid, 0)));
  if (!process.is_open()) return why_not_traced(handle, errno);
  Descriptors taken;
  for (const SharedChunk& chunk : handle.chunks) {
    taken.emplace_back(static_cast<int>(::syscall(kPidfdGetfd, process.get(), chunk.fd, 0)));
    if (!taken.back().is_open()) return why_not_traced(handle, errno);
  }
  *out = std::move(taken);
  return "";
}

std::string ask_over_socket(const IpcHandle& handle, Descriptors* out) {
  if (!handle.sender.has_value()) return who(handle) + " does not use torch_vmm, so it cannot be asked for descriptors";
  const Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket.is_open()) return "no Unix socket can be opened here: " + error_text(errno);
  limit_patience(socket, kPatienceOfClient);
  const SocketName name = name_of(handle.pid, *handle.sender);
  const auto* const address = reinterpret_cast<const sockaddr*>(&name.address);
  if (through_signals([&] { return ::connect(socket.get(), address, name.length); }) != 0) {
    return who(handle) + " cannot be asked over a Unix socket (" + error_text(errno) +
           "): it has ended, or has another network namespace (containers that share tensors need one in common)";
  }
  if (!peer_is_friend(socket)) return "the socket of " + who(handle) + " belongs to another user";
  Descriptors received;
  for (std::size_t done = 0; done < handle.chunks.size();) {
    Request request{};
    request.password = handle.sender->password;
    request.count = std::min(kMostInMessage, handle.chunks.size() - done);
    for (std::size_t k = 0; k < request.count; ++k) request.ids.at(k) = handle.chunks[done + k].id;
    const ssize_t sent = through_signals([&] { return ::send(socket.get(), &request, sizeof(request), MSG_NOSIGNAL); });
    if (sent != static_cast<ssize_t>(sizeof(request)) || !receive_reply(socket, request.count, &received)) {
      return who(handle) +
             " did not hand its descriptors over: it has freed the memory, belongs to another user, or one of the two "
             "can open no more (ulimit -n)";
    }
    done += request.count;
  }
  *out = std::move(received);
  return "";
}

Descriptors fetch_descriptors(const IpcHandle& handle) {
  Descriptors descriptors;
  const std::string not_taken = take_from_process(handle, &descriptors);
  if (not_taken.empty()) return descriptors;
  const std::string not_given = ask_over_socket(handle, &descriptors);
  if (not_given.empty()) return descriptors;
  throw NotAvailableError("memory of " + who(handle) + " cannot be opened here: " + not_taken + "; and " + not_given);
}

}  // namespace vmm

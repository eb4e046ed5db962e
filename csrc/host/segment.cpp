#include "host/segment.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

namespace deep_comm {

namespace {

constexpr char kSharedMemoryFolder[] = "/dev/shm";  // where Linux keeps POSIX shared memory
constexpr size_t kPageBytes = 4096;

[[noreturn]] void throw_errno(int error, const std::string& tried) {
  throw std::system_error(error, std::generic_category(), tried);
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// Field 22 of /proc/<pid>/stat: clock ticks from boot to the start of the process; "" when there is
// no such process.
std::string process_start_time(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string stat{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  // Field 2 is the program's name in parentheses and may itself hold spaces and parentheses.
  size_t position = stat.rfind(')');
  if (position == std::string::npos) return "";
  for (int field = 2; field < 22; ++field) {
    position = stat.find(' ', position + 1);
    if (position == std::string::npos) return "";
  }
  return stat.substr(position + 1, stat.find(' ', position + 1) - position - 1);
}

std::string random_hex() {
  unsigned char bytes[16];
  // Requests of up to 256 bytes are neither cut short nor interrupted.
  if (getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes)) {
    throw_errno(errno, "drawing the random part of a shared memory name");
  }
  std::string hex;
  for (unsigned char byte : bytes) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex;
}

std::string new_name() {
  return "/deep_comm." + std::to_string(geteuid()) + "." + std::to_string(getpid()) + "." +
         process_start_time(getpid()) + "." + random_hex();
}

void* map(int fd, size_t num_bytes, const std::string& name) {
  void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    throw_errno(errno, "mapping " + std::to_string(num_bytes) + " bytes of shared memory " + name);
  }
  return memory;
}

// Reserves every page now: a page that the file system cannot provide later would be a SIGBUS in
// the middle of a kernel.
void reserve(int fd, size_t num_bytes) {
  struct statvfs room;
  // Asked first, because posix_fallocate takes what there is before it fails, from everybody.
  const bool is_known = fstatvfs(fd, &room) == 0 && room.f_blocks > 0;
  const size_t available = is_known ? size_t{room.f_bavail} * room.f_frsize : 0;
  int error = is_known && available < num_bytes ? ENOSPC : 0;
  if (error == 0) {
    do {
      error = posix_fallocate(fd, 0, static_cast<off_t>(num_bytes));
    } while (error == EINTR);
  }
  if (error == ENOSPC || error == ENOMEM) {
    throw std::runtime_error("shared memory is too small: " + std::to_string(num_bytes) +
                             " bytes needed, " + std::to_string(available) + " available in " +
                             kSharedMemoryFolder +
                             " (free some, enlarge it, or use smaller buffers)");
  }
  if (error != 0) throw_errno(error, "reserving " + std::to_string(num_bytes) + " bytes");
}

void check_num_bytes(size_t num_bytes) {
  if (num_bytes == 0) throw std::invalid_argument("num_bytes is 0; it must be positive");
  if (num_bytes > static_cast<size_t>(PTRDIFF_MAX)) {
    throw std::invalid_argument("num_bytes is " + std::to_string(num_bytes) +
                                "; no object can be that large");
  }
}

// One decimal field of a segment's name, up to the next dot; -1 when it is not one.
int64_t take_number(std::string_view& text) {
  int64_t number = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end == text.data() + text.size() || *end != '.') return -1;
  text.remove_prefix(end + 1 - text.data());
  return number;
}

// Does the name say that it is a segment of this user whose creator no longer runs?
bool is_left_over(std::string_view file_name) {
  constexpr std::string_view kPrefix = "deep_comm.";
  if (!file_name.starts_with(kPrefix)) return false;
  file_name.remove_prefix(kPrefix.size());
  if (take_number(file_name) != static_cast<int64_t>(geteuid())) return false;
  const int64_t pid = take_number(file_name);
  const int64_t start_time = take_number(file_name);
  if (pid <= 0 || start_time < 0) return false;  // not a name of ours: leave it alone
  return process_start_time(static_cast<pid_t>(pid)) != std::to_string(start_time);
}

// The creator holds a lock on its segment while it lives. A container with process ids of its own
// may share this folder with us: its processes look dead from here, their locks do not. The name goes
// while this process holds the lock, so that a creator that waits for it learns of that.
bool unlink_unlocked(const std::string& name) {
  FileDescriptor file(shm_open(name.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0));
  if (file.get() < 0 || flock(file.get(), LOCK_EX | LOCK_NB) != 0) return false;
  return shm_unlink(name.c_str()) == 0;
}

// Before anything that takes long. False: somebody who saw the name without a lock has removed it.
bool lock_own(int file, const std::string& name) {
  while (flock(file, LOCK_SH) != 0) {
    if (errno != EINTR) throw_errno(errno, "locking " + name);
  }
  struct stat status;
  if (fstat(file, &status) != 0) throw_errno(errno, "asking for the links of " + name);
  return status.st_nlink > 0;
}

}  // namespace

Segment::Segment(std::string name, void* memory, size_t num_bytes, pid_t creator, int lock_fd)
    : name_(std::move(name)),
      memory_(memory),
      num_bytes_(num_bytes),
      creator_(creator),
      lock_fd_(lock_fd) {}

Segment::Segment(Segment&& other) noexcept
    : name_(std::move(other.name_)),
      memory_(std::exchange(other.memory_, nullptr)),
      num_bytes_(other.num_bytes_),
      creator_(std::exchange(other.creator_, 0)),
      lock_fd_(std::exchange(other.lock_fd_, -1)) {}

Segment Segment::create(size_t num_bytes) {
  check_num_bytes(num_bytes);
  const std::string name = new_name();
  FileDescriptor file(shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  if (file.get() < 0) throw_errno(errno, "creating shared memory " + name);
  if (!lock_own(file.get(), name)) return create(num_bytes);
  try {
    if (ftruncate(file.get(), static_cast<off_t>(num_bytes)) != 0) {
      throw_errno(errno, "sizing shared memory to " + std::to_string(num_bytes) + " bytes");
    }
    reserve(file.get(), num_bytes);
    void* memory = map(file.get(), num_bytes, name);
    return {name, memory, num_bytes, getpid(), file.release()};
  } catch (...) {
    shm_unlink(name.c_str());
    throw;
  }
}

Segment Segment::attach(const std::string& name, size_t num_bytes) {
  check_num_bytes(num_bytes);
  FileDescriptor file(shm_open(name.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0));
  if (file.get() < 0) throw_errno(errno, "attaching to shared memory " + name);
  struct stat status;
  if (fstat(file.get(), &status) != 0) throw_errno(errno, "asking for the size of " + name);
  if (status.st_uid != geteuid()) {
    throw std::runtime_error("shared memory " + name + " belongs to user " +
                             std::to_string(status.st_uid) + ", this process runs as user " +
                             std::to_string(geteuid()));
  }
  if (static_cast<size_t>(status.st_size) != num_bytes) {
    throw std::runtime_error("shared memory " + name + " has " + std::to_string(status.st_size) +
                             " bytes, expected " + std::to_string(num_bytes) +
                             ": do all ranks ask for the same buffer sizes?");
  }
  return {name, map(file.get(), num_bytes, name), num_bytes, 0, -1};
}

Segment::~Segment() {
  if (creator_ == getpid()) unlink();
  close();
}

void Segment::unlink() {
  creator_ = 0;
  // Already gone is what was asked for.
  if (shm_unlink(name_.c_str()) != 0) errno = 0;
}

void Segment::close() {
  if (lock_fd_ >= 0) ::close(std::exchange(lock_fd_, -1));
  if (memory_ == nullptr) return;
  munmap(memory_, num_bytes_);
  memory_ = nullptr;
}

std::vector<std::string> remove_stale_segments() {
  std::vector<std::string> removed;
  std::error_code error;  // other users and other runs create and remove files meanwhile: not ours
  for (std::filesystem::directory_iterator entry(kSharedMemoryFolder, error), end;
       !error && entry != end; entry.increment(error)) {
    const std::string file_name = entry->path().filename().string();
    if (!is_left_over(file_name)) continue;
    const std::string name = "/" + file_name;
    struct stat status;
    const std::string path = entry->path().string();
    if (lstat(path.c_str(), &status) != 0 || status.st_uid != geteuid()) continue;
    if (unlink_unlocked(name)) removed.push_back(name);
  }
  return removed;
}

uintptr_t host_allocate(size_t num_bytes) {
  check_num_bytes(num_bytes);
  void* memory = nullptr;
  const size_t rounded_bytes = (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  if (const int error = posix_memalign(&memory, kPageBytes, rounded_bytes); error != 0) {
    throw std::runtime_error("allocating " + std::to_string(num_bytes) +
                             " bytes: " + std::generic_category().message(error));
  }
  memset(memory, 0, rounded_bytes);
  return reinterpret_cast<uintptr_t>(memory);
}

void host_free(uintptr_t address) { std::free(reinterpret_cast<void*>(address)); }

}  // namespace deep_comm

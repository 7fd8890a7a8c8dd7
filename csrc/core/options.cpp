#include "core/options.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <locale>
#include <sstream>
#include <string_view>

#include "base/errors.h"

extern char** environ;  // NOLINT(readability-redundant-declaration): POSIX leaves it to the program

namespace vmm {

namespace {

constexpr const char* kPrefix = "TORCH_VMM_";
constexpr long double kBytesBound = 9223372036854775808.0L;  // 2**63

// As it was given, of a length that fits a message.
std::string quoted(const std::string& text) {
  constexpr std::size_t kLongest = 60;
  return "'" + (text.size() <= kLongest ? text : text.substr(0, kLongest - 3) + "...") + "'";
}

[[noreturn]] void refuse_size(const std::string& text) {
  throw InvalidArgumentError(quoted(text) +
                             " is not a size: give bytes (4096) or a number with a unit, binary \"2MiB\", "
                             "\"1.5 GiB\" or decimal \"2MB\"");
}

bool parse_flag(const std::string& variable, const std::string& text) {
  if (text == "1" || text == "true" || text == "on") return true;
  if (text == "0" || text == "false" || text == "off") return false;
  throw InvalidArgumentError(variable + "='" + text + "': give 1 or 0 (true/false, on/off)");
}

}  // namespace

std::size_t parse_bytes(const std::string& text) {
  std::string compact;
  for (const char c : text) {
    if (std::isspace(static_cast<unsigned char>(c)) == 0) {
      compact += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
  }
  std::size_t digits = 0;
  bool point = false;
  while (digits < compact.size() &&
         ((std::isdigit(static_cast<unsigned char>(compact[digits])) != 0) || (compact[digits] == '.' && !point))) {
    point = point || compact[digits] == '.';
    ++digits;
  }
  if (digits == 0 || (digits == 1 && point)) refuse_size(text);
  const std::string unit = compact.substr(digits);
  static constexpr const char* kLetters = "kmgtpezy";
  long double scale = 1;
  if (!unit.empty() && unit != "b") {
    const char* letter = unit[0] == '\0' ? nullptr : std::strchr(kLetters, unit[0]);
    const std::string rest = unit.substr(1);
    if (letter == nullptr || (rest != "ib" && rest != "b")) refuse_size(text);
    const long double base = rest == "ib" ? 1024.0L : 1000.0L;
    for (const char* step = kLetters; step <= letter; ++step) scale *= base;
  }
  long double number = 0;
  std::istringstream digits_only(compact.substr(0, digits));
  digits_only.imbue(std::locale::classic());  // strtold() reads "1.5" as 1 where the point is a comma
  digits_only >> number;
  const long double bytes = number * scale;
  if (bytes >= kBytesBound) throw InvalidArgumentError(quoted(text) + " is too large a size: 2**63 - 1 bytes at most");
  // "1.3 GiB" is no whole number of bytes and is rounded down; "1.3" is none at all.
  const bool whole = bytes == static_cast<long double>(static_cast<std::size_t>(bytes));
  if (scale == 1 && !whole) refuse_size(text);
  return static_cast<std::size_t>(bytes);
}

DebugMode parse_debug_mode(const std::string& text) {
  const auto refuse = [&text]() {
    throw InvalidArgumentError(quoted(text) +
                               " is not a debug mode: give \"off\", or \"guard\" or \"canary\", and behind these "
                               "\",sample=1/100\" to watch one of a hundred allocations (1/1 to 1/1000000000)");
  };
  if (text == to_string(DebugMode{})) return {};
  const std::size_t comma = text.find(',');
  const std::string kind = text.substr(0, comma);
  DebugMode mode;
  if (kind == "guard") {
    mode.kind = DebugMode::Kind::guard;
  } else if (kind == "canary") {
    mode.kind = DebugMode::Kind::canary;
  } else {
    refuse();
  }
  if (comma == std::string::npos) return mode;
  static constexpr std::string_view kSample = "sample=1/";
  static constexpr std::size_t kMostDigits = 10;
  static constexpr std::size_t kMostRare = 1'000'000'000;
  const std::string sample = text.substr(comma + 1);
  const std::string digits = sample.substr(std::min(sample.size(), kSample.size()));
  const bool is_number =
      !digits.empty() && digits.size() <= kMostDigits && digits.find_first_not_of("0123456789") == std::string::npos;
  if (sample.rfind(kSample, 0) != 0 || !is_number) refuse();
  mode.one_in = std::strtoull(digits.c_str(), nullptr, 10);
  if (mode.one_in == 0 || mode.one_in > kMostRare) refuse();
  return mode;
}

std::string to_string(const DebugMode& mode) {
  if (!mode.is_on()) return "off";
  std::string text = mode.kind == DebugMode::Kind::guard ? "guard" : "canary";
  if (mode.one_in != 1) text += ",sample=1/" + std::to_string(mode.one_in);
  return text;
}

const std::vector<OptionRow>& option_table() {
  static const std::vector<OptionRow> kRows = {
      {"scrub", "TORCH_VMM_SCRUB", "Zero memory that changes its model.", &Options::scrub},
      {"store_bytes", "TORCH_VMM_STORE_BYTES",
       "Unmapped chunks that the chunk store keeps instead of giving them back to the driver, for each group.",
       &Options::store_bytes},
      {"default_capacity_bytes", "TORCH_VMM_DEFAULT_CAPACITY",
       "Virtual capacity of a pool that names none, or less where the process is short of addresses.",
       &Options::default_capacity_bytes, "4 x device memory", kMostCapacity},
      {"host_bytes", "TORCH_VMM_HOST_BYTES",
       "Memory of the \"cpu\" device. A control group (container) that allows the process less RAM counts.",
       &Options::host_bytes, "80 % of RAM", kUnlimited, /*least=*/2 * kMiB},
      {"exportable", "TORCH_VMM_EXPORTABLE", "Create chunks that other processes can import, where the device can.",
       &Options::exportable},
      {"debug", "TORCH_VMM_DEBUG",
       "Look for memory errors: \"guard\" (pages without memory), \"canary\" (patterns), and \",sample=1/N\".",
       &Options::debug},
  };
  return kRows;
}

std::string OptionRow::default_text() const {
  if (default_words != nullptr) return default_words;
  const Options defaults;
  if (const auto* flag = std::get_if<bool Options::*>(&member)) return defaults.**flag ? "1" : "0";
  if (const auto* mode = std::get_if<DebugMode Options::*>(&member)) return to_string(defaults.**mode);
  std::string text = format_bytes(defaults.*std::get<std::size_t Options::*>(member));
  text.erase(std::remove(text.begin(), text.end(), ' '), text.end());  // one word, as a shell wants it
  return text;
}

namespace {

// What `parse` makes of `text`; where it refuses, it says of which variable.
template <typename Value>
Value parse_of(const std::string& variable, const std::string& text, Value (*parse)(const std::string&)) {
  try {
    return parse(text);
  } catch (const InvalidArgumentError& error) {
    throw InvalidArgumentError(variable + ": " + error.what());
  }
}

const OptionRow& row_of(const std::string& variable) {
  std::string known;
  for (const OptionRow& row : option_table()) {
    if (variable == row.variable) return row;
    known.append(known.empty() ? "" : ", ").append(row.variable);
  }
  throw InvalidArgumentError("unknown variable " + variable + "; known: " + known);
}

void set(Options& options, const OptionRow& row, const std::string& text) {
  if (const auto* flag = std::get_if<bool Options::*>(&row.member)) {
    options.** flag = parse_flag(row.variable, text);
  } else if (const auto* mode = std::get_if<DebugMode Options::*>(&row.member)) {
    options.** mode = parse_of(row.variable, text, parse_debug_mode);
  } else {
    const std::size_t bytes = parse_of(row.variable, text, parse_bytes);
    const bool is_none = bytes == 0 && row.default_words != nullptr;
    if (is_none || bytes > row.most || bytes < row.least) {
      throw InvalidArgumentError(std::string(row.variable) + ": " + quoted(text) + " is " +
                                 (is_none             ? "no memory at all"
                                  : bytes < row.least ? "less than the least, " + format_bytes(row.least)
                                                      : "more than the most, " + format_bytes(row.most)) +
                                 "; set it to nothing for the default, " + row.default_text());
    }
    options.*std::get<std::size_t Options::*>(row.member) = bytes;
  }
}

}  // namespace

Options Options::from_environment() {
  Options options;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, kPrefix, std::strlen(kPrefix)) != 0) continue;
    const std::string pair = *entry;
    const std::size_t equals = pair.find('=');
    const std::string name = pair.substr(0, equals);  // of its own: g++ 13 takes the row for a part of it
    const OptionRow& row = row_of(name);
    // Set to nothing is not set, as for torch: so a shell switches one off for one command.
    if (equals + 1 < pair.size()) set(options, row, pair.substr(equals + 1));
  }
  return options;
}

}  // namespace vmm

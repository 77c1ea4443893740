// The engine for Python: the only file of the engine that knows it. No thread of the engine ever
// touches a Python object; whoever submits keeps the memory alive until the request is done.
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "aio/backend_factory.h"
#include "aio/checksum.h"
#include "aio/engine.h"
#include "aio/file_map.h"
#include "aio/page_buffer.h"

namespace py = pybind11;

namespace dsx::aio {
namespace {

// Lets other Python threads run. When Python has ended, no daemon thread gets the lock back: before
// 3.14 it is ended where it asks, by an exception that nobody may keep. That would end the process
// where a destructor is on its way out, and elsewhere run destructors of Python objects without the
// lock. So the thread stays here until the process is over, as it does from 3.14 on.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) pause();
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

// A File that Python can close while requests on it are still on their way.
class FileHandle {
 public:
  explicit FileHandle(std::shared_ptr<File> file) : path_(file->path()), file_(std::move(file)) {}

  const std::string& path() const { return path_; }
  bool closed() const { return !file_; }
  void close() { file_.reset(); }
  // In a forked child: requests that only the parent can end hold the file, and its space.
  void abandon() {
    if (file_) file_->abandon();
    file_.reset();
  }
  const std::shared_ptr<File>& open() const {
    if (!file_) throw py::value_error("aio: file " + path_ + " is closed, expected an open one");
    return file_;
  }

 private:
  std::string path_;
  std::shared_ptr<File> file_;
};

// Pages as a Python buffer, which says when it goes.
struct Pages {
  explicit Pages(int64_t bytes) : buffer(static_cast<size_t>(bytes)) {}
  ~Pages() {
    if (on_free.is_none()) return;
    const py::error_scope kept;  // an exception may be on its way already
    try {
      on_free();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("Pages.on_free");
    }
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  PageBuffer buffer;
  py::object on_free = py::none();
};

Mode mode_of(const std::string& name) {
  if (name == "read") return Mode::read;
  if (name == "write") return Mode::write;
  if (name == "update") return Mode::update;
  throw py::value_error("File: mode is '" + name + "', expected read, write or update");
}

// Paths need not be UTF-8.
py::object text_of(const std::string& text) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeFSDefaultAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

// The bytes of a path: str, bytes or os.PathLike. `what` names operation and argument in errors.
std::string path_of(const char* what, const py::object& path) {
  PyObject* encoded = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &encoded) == 0) {
    const py::error_already_set error;
    const std::string got = std::string(what) + " is ";
    if (error.matches(PyExc_TypeError)) {
      const std::string kind = py::str(py::type::of(path).attr("__name__"));
      const bool vowel = std::string("aeiouAEIOU").find(kind[0]) != std::string::npos;
      throw py::type_error(got + (vowel ? "an " : "a ") + kind + ", expected a str or os.PathLike");
    }
    if (error.matches(PyExc_ValueError) && !error.matches(PyExc_UnicodeError)) {
      const py::object text = py::module_::import("os").attr("fsdecode")(path);
      throw py::value_error(got + std::string(py::repr(text)) +
                            ", expected one without zero bytes");
    }
    throw error;
  }
  const std::string name = py::reinterpret_steal<py::bytes>(encoded);
  if (!name.empty()) return name;
  throw py::value_error(std::string(what) + " is '', expected the path of a file or folder");
}

// OSError chooses its subclass by the code.
void set_os_error(int code, const std::string& text) {
  const py::object error = py::reinterpret_borrow<py::object>(PyExc_OSError)(code, text_of(text));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
}

// An Engine, and the kind of its backend.
class NamedEngine {
 public:
  NamedEngine(int64_t block_size, int queue_depth, int threads, const std::string& backend) {
    const Options options{block_size, queue_depth, threads};
    if (backend == "auto") {
      make_best(options);
    } else {
      make(options, kind_of(backend));
    }
  }

  ~NamedEngine() {
    const Unlocked unlocked;  // it waits for what is in flight
    engine_.reset();
  }

  const char* name() const { return name_of(kind_); }
  Engine& engine() { return *engine_; }

 private:
  void make(const Options& options, BackendKind kind) {
    try {
      engine_ = std::make_unique<Engine>(options,
                                         [kind](int depth) { return make_backend(kind, depth); });
      kind_ = kind;
    } catch (const std::system_error& error) {
      const int code = error.code().value();
      throw IoError(code, std::string("AsyncIO: backend ") + name_of(kind) +
                              " cannot be had: " + error.what() + hint_for(kind, code));
    }
  }

  void make_best(const Options& options) {
    for (const BackendKind kind : backend_kinds) {
      try {
        return make(options, kind);
      } catch (const IoError&) {
        if (kind == BackendKind::threads) throw;  // the last one
      }
    }
  }

  BackendKind kind_{};
  std::unique_ptr<Engine> engine_;
};

std::shared_ptr<Request> submit(NamedEngine& engine, const py::object& target, uintptr_t address,
                                int64_t bytes, int64_t offset, bool write, bool truncate) {
  Transfer transfer;
  transfer.direction = write ? Direction::write : Direction::read;
  if (py::isinstance<FileHandle>(target)) {
    transfer.target = target.cast<const FileHandle&>().open();
  } else {
    transfer.target = path_of("AsyncIO: path", target);
  }
  transfer.address = reinterpret_cast<char*>(address);
  transfer.bytes = bytes;
  transfer.offset = offset;
  transfer.truncate = truncate;
  const Unlocked unlocked;  // a worker may hold the queue
  return engine.engine().submit(std::move(transfer));
}

py::dict dict_of(const Stats& stats) {
  py::dict dict;
  dict["submitted"] = stats.submitted;
  dict["completed"] = stats.completed;
  dict["failed"] = stats.failed;
  dict["cancelled"] = stats.cancelled;
  dict["bytes_read"] = stats.bytes_read;
  dict["bytes_written"] = stats.bytes_written;
  dict["direct_bytes"] = stats.direct_bytes;
  dict["fixed_bytes"] = stats.fixed_bytes;
  dict["copied_bytes"] = stats.copied_bytes;
  dict["resubmitted"] = stats.resubmitted;
  dict["direct_refused"] = stats.direct_refused;
  return dict;
}

py::dict probe_backends() {
  py::dict found;
  for (const BackendKind kind : backend_kinds) {
    int code = 0;
    try {
      make_backend(kind, 1);
    } catch (const std::system_error& error) {
      code = error.code().value();
    }
    found[name_of(kind)] = code;
  }
  return found;
}

void bind_file(py::module_& module) {
  py::class_<FileHandle>(module, "File", py::module_local())
      .def(py::init([](const py::object& path, const std::string& mode) {
    const std::string name = path_of("File: path", path);
    const Mode asked = mode_of(mode);
    const Unlocked unlocked;
    return std::make_unique<FileHandle>(File::open(name, asked));
  }),
           py::arg("path"), py::arg("mode"))
      .def_static("scratch",
                  [](const py::object& directory) {
    const std::string name = path_of("File.scratch: directory", directory);
    const Unlocked unlocked;
    return std::make_unique<FileHandle>(File::scratch(name));
  }, py::arg("directory"))
      .def_property_readonly("path", [](FileHandle& self) { return text_of(self.path()); })
      .def_property_readonly("closed", &FileHandle::closed)
      .def_property_readonly("direct", [](FileHandle& self) { return self.open()->direct() >= 0; })
      .def_property_readonly("offset_alignment",
                             [](FileHandle& self) { return self.open()->alignment().granule; })
      .def_property_readonly("memory_alignment",
                             [](FileHandle& self) { return self.open()->alignment().memory; })
      .def("fileno", [](FileHandle& self) { return self.open()->buffered(); })
      .def("size", [](FileHandle& self) { return self.open()->size(); })
      .def("free_bytes", [](FileHandle& self) { return self.open()->free_bytes(); })
      .def("sync",
           [](FileHandle& self) {
    const auto file = self.open();
    const Unlocked unlocked;
    file->sync();
  })
      .def("truncate",
           [](FileHandle& self, int64_t bytes) {
    const auto file = self.open();
    const Unlocked unlocked;
    file->truncate(bytes);
  }, py::arg("nbytes"))
      .def("allocate",
           [](FileHandle& self, int64_t offset, int64_t bytes) {
    const auto file = self.open();
    const Unlocked unlocked;
    file->allocate(offset, bytes);
  }, py::arg("offset"), py::arg("nbytes"))
      .def("refuse_direct", [](FileHandle& self) { self.open()->refuse_direct(); })
      .def("close", &FileHandle::close)
      .def("abandon", &FileHandle::abandon);
}

void bind_pages(py::module_& module) {
  py::class_<Pages>(module, "Pages", py::module_local(), py::buffer_protocol())
      .def(py::init([](int64_t bytes) {
    if (bytes < 0) throw py::value_error("Pages: nbytes is negative, expected 0 or more");
    return std::make_unique<Pages>(bytes);
  }),
           py::arg("nbytes"))
      .def_buffer([](Pages& self) {
    return py::buffer_info(reinterpret_cast<uint8_t*>(self.buffer.address()),
                           static_cast<py::ssize_t>(self.buffer.bytes()));
  })
      .def_property_readonly(
          "address", [](Pages& self) { return reinterpret_cast<uintptr_t>(self.buffer.address()); })
      .def_property_readonly("nbytes", [](Pages& self) { return self.buffer.bytes(); })
      .def_readwrite("on_free", &Pages::on_free)
      .def("lock", [](Pages& self) { return self.buffer.lock(); }, py::call_guard<Unlocked>());
}

void bind_file_map(py::module_& module) {
  py::class_<FileMap>(module, "FileMap", py::module_local(), py::buffer_protocol())
      .def(py::init([](int64_t bytes) {
    if (bytes < 0) throw py::value_error("FileMap: nbytes is negative, expected 0 or more");
    return std::make_unique<FileMap>(static_cast<size_t>(bytes));
  }),
           py::arg("nbytes"))
      .def_buffer([](FileMap& self) {
    return py::buffer_info(reinterpret_cast<uint8_t*>(self.address()),
                           static_cast<py::ssize_t>(self.bytes()));
  })
      .def("show",
           [](FileMap& self, int64_t begin, int64_t bytes, const FileHandle& file, int64_t offset,
              bool shared) {
    if (begin < 0 || bytes < 0) throw py::value_error("FileMap: a part is negative");
    self.show(static_cast<size_t>(begin), static_cast<size_t>(bytes), file.open()->buffered(),
              offset, shared);
  },
           py::arg("begin"), py::arg("nbytes"), py::arg("file"), py::arg("offset"),
           py::arg("shared") = false)
      .def("hide", &FileMap::hide);
}

void bind_engine(py::module_& module) {
  py::class_<Mailbox, std::shared_ptr<Mailbox>>(module, "Mailbox", py::module_local())
      .def(py::init())
      .def("put", &Mailbox::put, py::arg("number"))
      .def("take", [](Mailbox& self, double seconds) {
    std::vector<int64_t> numbers;
    {
      const Unlocked unlocked;
      numbers = self.take(seconds);
    }
    py::list list;
    for (const int64_t number : numbers) list.append(number);
    return list;
  }, py::arg("seconds"));
  py::class_<Request, std::shared_ptr<Request>>(module, "Request", py::module_local())
      .def("wait", &Request::wait_for, py::arg("seconds"), py::call_guard<Unlocked>())
      .def("done", &Request::done)
      .def("begun", &Request::begun)
      .def("cancel", &Request::cancel)
      .def("tell", &Request::tell, py::arg("mailbox"), py::arg("number"))
      .def("check", [](const Request& self) {
    if (const auto failure = self.failure()) {
      set_os_error(failure->code, failure->text);
      throw py::error_already_set();
    }
  });
  py::class_<NamedEngine>(module, "Engine", py::module_local())
      .def(py::init<int64_t, int, int, const std::string&>(), py::arg("block_size"),
           py::arg("queue_depth"), py::arg("threads"), py::arg("backend"))
      .def_property_readonly("backend", &NamedEngine::name)
      .def("submit", &submit, py::arg("target"), py::arg("address"), py::arg("nbytes"),
           py::arg("offset"), py::kw_only(), py::arg("write"), py::arg("truncate"))
      .def("register",
           [](NamedEngine& self, uintptr_t address, size_t bytes) {
    return self.engine().register_region(reinterpret_cast<void*>(address), bytes);
  }, py::arg("address"), py::arg("nbytes"), py::call_guard<Unlocked>())
      .def("unregister",
           [](NamedEngine& self, int token) { self.engine().unregister_region(token); },
           py::arg("token"), py::call_guard<Unlocked>())
      .def("stats", [](NamedEngine& self) {
    return dict_of(self.engine().stats());
  }).def("close", [](NamedEngine& self) { self.engine().close(); }, py::call_guard<Unlocked>());
}

}  // namespace

PYBIND11_MODULE(async_io, module) {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const IoError& error) {
      set_os_error(error.code(), error.what());
    }
  });
  bind_file(module);
  bind_pages(module);
  bind_file_map(module);
  bind_engine(module);
  module.def("probe_backends", &probe_backends);
  module.def("crc32c", [](uintptr_t address, size_t bytes, uint32_t seed) {
    return crc32c(reinterpret_cast<const void*>(address), bytes, seed);
  }, py::arg("address"), py::arg("nbytes"), py::arg("seed") = 0, py::call_guard<Unlocked>());
}

}  // namespace dsx::aio
